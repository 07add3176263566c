"""Measurements of `bench_device.py`.

- `sweeping`: graphs and time of a sweep, over toy layers and over layers of the true size
- `timed_sweep`: one process of a timed sweep
- `regrouping`: time and memory of copying experts into grouped layouts, against a plain copy of as many bytes
- `bisection`: number of runs that find the wrong layers of 62
"""
