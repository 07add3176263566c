"""What `bench_device.py` measures, and how.

- `sweeping`: graphs and time of a sweep, each run of it in a `timed_sweep`
- `regrouping`: experts' matrices into the grouped layouts, against a plain copy of as many bytes
"""
