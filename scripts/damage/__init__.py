"""Damaged captures, for `bench_damage.py`.

- `tampering`: changes to the files of a capture, with or without new digests
- `damages`: ways in which captures are damaged
- `scene`: the captures, and the comparison of damaged copies
"""
