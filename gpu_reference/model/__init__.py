"""transformers' model, placed on devices, loaded, and proved free of the known traps.

- `model`: the model, loaded whole or built without weights
- `model_checks`: the proofs that it fell into none of the known traps
- `placement`: the devices that hold its parts
- `footprint`: the memory that a golden takes, whole or streamed
"""
