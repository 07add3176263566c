"""The port under test.

- `targets`: the port, found in its `sources`, built, and loaded with its weights
- `exposure`: which sites it shows; `layouts`: how the pieces that ranks hold of a site make it up
- `tracing`: a layer compiled into a file; `traced`: such a file as a port
"""
