"""Parallel state of the stand-in."""
