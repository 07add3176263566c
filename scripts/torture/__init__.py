"""Harm that a hostile world does to mm2, for `bench_torture.py`; each part keeps one promise.

- `deaths`: commands killed while they write, and run again
- `dying_ranks`: ranks that die or stand still, and a folder that goes away under them
- `forked_command`: a command in a fork of a process that has imported torch
- `power_loss`: commands whose power is cut, in a model of the disk
- `disk_model`: what a disk may hold after a power loss
- `disk_trace`: what a command did to files, as strace tells it
- `tally`: checks of one promise, and those that broke it
"""
