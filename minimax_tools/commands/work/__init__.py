"""Work of the commands of `mm2-split`: each file is imported when the command of its name runs.

- `synthesize`: a checkpoint made
- `plan`: a model divided among machines, as text and as JSON
- `extract`, `fetch`: slices cut out of a checkpoint, and fetched from a hub
- `verify`: the proof that each node loads its slice
- `memory`: the bytes of a checkpoint
- `cache`: what was fetched from remote addresses
"""
