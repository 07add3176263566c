"""Killed and stopped commands, odd streams and great sizes, for `bench_torture.py`; each part keeps one promise.

- `commands`: commands of mm2 as processes, that signals stop, and whose standard streams are closed or full
- `deaths`: commands killed while they write, and run again
- `memory`: captures, folders and an index of great size
- `soak`: many sweeps in one process
- `tally`: checks of one promise, and those that broke it
"""
