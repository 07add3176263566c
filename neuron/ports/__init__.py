"""The port under test.

- `targets`: the port, found in its `sources`, built, and loaded with its weights
- `exposure`: which sites it shows
"""
