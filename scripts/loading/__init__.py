"""Measurements of `bench_loading.py`.

- `bench`: checkpoints, and probes in processes of their own
- `scales`: sizes of the measurement
- `memory`: figures of peaks
- `speed`: figures of time
- `models`: figures of whole models, split or of full size
- `probe`: main function of a probe's process
- `goldens`: probes of goldens and of the streamed forward pass
- `rivals`: probes of transformers and accelerate
- `reads`: probes of reading and dequantising
- `splits`: probes of split models
- `inputs`: rows and digests that several probes share
"""
