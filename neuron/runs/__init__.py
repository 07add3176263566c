"""A run of a port's layers, from their hidden states to the capture.

- `runner`: the run; `golden_feed`: what a golden gives it
- `executor`: its layers, one at a time; `head`: the model outside its layers
- `footprint`: what a run takes of the host's memory, and the limits it is held to
"""
