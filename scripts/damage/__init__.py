"""Damaged captures, for `bench_damage.py`.

- `tampering`: changes to the files of a capture, with or without new digests
- `damages`: ways in which captures are damaged
- `captures`: whole captures of a right port, and the comparison of damaged copies
"""
