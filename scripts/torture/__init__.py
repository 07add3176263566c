"""What a hostile world does to mm2, for `bench_torture.py`; each part keeps one promise.

- `deaths`: commands killed while they write, and run again
- `forked_command`: a command in a fork of a process that has imported torch
- `tally`: checks of one promise, and those that broke it
"""
