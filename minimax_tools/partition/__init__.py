"""A model divided among nodes: what its parts cost, who gets which, cut out and proved.

| module | the question it answers |
|---|---|
| `node` | which machines there are |
| `cost` | what the model's parts take: bytes, parameters, FLOPs |
| `chain` | which runs of layers fit a node |
| `planners` | who gets which layers |
| `plan` | the plan as a value and a file, and whether it is whole |
| `stored_weights` | the tensors that are here, whatever the architecture |
| `slice_cut`, `byte_ranges` | which bytes go into which file of a slice, and their copying |
| `slice_folder`, `slice_file`, `tensor_digest` | a slice on the disk, what it says of itself, its tie to the source |
| `extract` | a node's slice along a plan |
| `source` | the checkpoint, as far as it is known here: headers, the index file, or config.json alone |
| `download`, `fetch`, `sparse_source` | which files a slice needs, or which bytes, and their way here |
| `holding`, `read_record` | what a node has, what it read |
| `verify`, `verdicts`, `verification_text` | whether all of it adds up, each claim with what contradicts it |
| `splitter` | a node's tensors by name |
"""
