"""Tensor capture of the stand-in."""
