"""What `bench_device.py` measures, and how.

- `regrouping`: experts' matrices into the grouped layouts, against a plain copy of as many bytes
"""
