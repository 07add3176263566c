"""Hostile files, dying processes and strange machines, for `bench_torture.py`; each part keeps one promise.

- `tally`: checks of one promise, and those that broke it
"""
