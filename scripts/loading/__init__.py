"""What `bench_loading.py` measures, and how.

`bench` runs a probe in a process of its own; `reads`, `goldens`, `rivals` and `splits` are what such a process runs;
`memory`, `speed` and `models` make figures of what it tells.
"""
