"""Damaged captures, which tests/scripts/test_damage.py gives to the commands; other tests change files as they do.

- `tampering`: changes to the files of a capture, with or without new digests
- `damages`: ways in which captures are damaged
- `captures`: whole captures of a right port, and the comparison of damaged copies
"""
