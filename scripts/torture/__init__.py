"""Hostile files, dying processes and strange machines, for `bench_torture.py`; each part keeps one promise.

- `memory`: captures, folders and an index of great size
- `soak`: many sweeps in one process
- `stops`: commands that signals stop
- `streams`: standard streams that are closed or full
- `transfers`: a hub that fails, lies and is shared
- `commands`: the commands that are tried
- `tally`: checks of one promise, and those that broke it
"""
