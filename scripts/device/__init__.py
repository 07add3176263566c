"""The groups of figures that `bench_device.py` measures."""
