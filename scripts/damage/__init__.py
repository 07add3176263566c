"""Damaged captures: what of them mm2 refuses.

- `tampering` changes files of a capture, and signs the change where one wants it hidden
- `damages` are the ways in which captures are damaged
- `scene` makes the captures, damages a copy, and compares
"""
