"""Slices of a checkpoint along a plan: cut out, fetched and proved.

| module | the question it answers |
|---|---|
| `source` | the checkpoint, as far as it is known here: headers, or config.json alone |
| `headers`, `stored_weights` | the tensors of a slice, or all that are here, whatever the architecture |
| `cut`, `byte_ranges` | which bytes go into which file of a slice, and their copying |
| `folder`, `description`, `digest` | a slice on the disk, what it says of itself, its tie to the source |
| `extract`, `splitter` | a node's slice along a plan, or by its tensors' names |
| `download`, `fetch`, `sparse_source` | which files a slice needs, or which bytes, and their way here |
| `holding` | what a node has |
| `verify`, `verdicts`, `verification_text` | whether all of it adds up, each claim with what contradicts it |
"""
