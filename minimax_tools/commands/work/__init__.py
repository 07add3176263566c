"""Work of a command of `mm2-split`, imported when it runs.

- `train`: a checkpoint made by training
"""
