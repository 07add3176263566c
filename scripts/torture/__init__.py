"""Killed commands, great sizes and many runs, for `bench_torture.py`; each part keeps one promise.

- `deaths`: commands killed while they write, and run again
- `memory`: captures, folders and an index of great size
- `soak`: many sweeps in one process
- `tally`: checks of one promise, and those that broke it
"""
