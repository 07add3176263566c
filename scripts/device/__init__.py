"""Measurements of `bench_device.py`.

- `sweeping`: graphs and time of a sweep
- `timed_sweep`: one process of a timed sweep
- `regrouping`: experts copied into grouped layouts, against a plain copy of as many bytes
- `bisection`: number of runs that find the wrong layers of 62
"""
