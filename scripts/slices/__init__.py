"""Measurements of `bench_slices.py`.

- `planning`: the planners' plans, against those of exo's rule
- `extracting`: speed of cutting a slice, against `cp`, and its memory
- `running`: bytes that a rank reads, and the time that two ranks save
- `timed_capture`: one process of a timed golden capture
"""
