"""Measurements of `bench_loading.py`.

- `bench`: sizes, checkpoints, and probes in processes of their own
- `memory`: figures of peaks
- `speed`: figures of time, and of a golden of the true size
- `probe`: main function of a probe's process
- `goldens`: probes of goldens and of the streamed forward pass
- `rivals`: probes of transformers and accelerate
- `reads`: probes of reading and dequantising; inputs and digests of the others
"""
