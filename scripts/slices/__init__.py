"""What bench_slices.py measures: plans, slices cut out, and runs along a plan; each file gives its figures."""
