"""Commands of `mm2-split`, registered in `minimax_tools.cli`: options, help and what each does.

- `synthesize`: a checkpoint of random numbers
- `plan`: a model divided among machines
- `extract`: slices cut out of a checkpoint
- `fetch`: a slice fetched from a hub
- `memory`: the bytes of a checkpoint, and what it takes in memory
- `cache`: what was fetched from remote addresses
- `verify`: the proof that each node loads its slice
- `options`: options that several of them share
- `work`: what `train` does, imported when it runs
"""
