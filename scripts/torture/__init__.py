"""What a hostile world does to mm2, for `bench_torture.py`; each part keeps one promise.

- `tally`: checks of one promise, and those that broke it
"""
