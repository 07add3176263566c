"""The port under test.

- `targets`: the port, found in its `sources`, built, and loaded with its weights
- `exposure`: which sites it shows, and how the pieces that ranks hold of a site make it up
- `own_code`: what a port raises, `returned`: the output it gives, and `past`: what it gives to decode
- `nxdi`: ports on neuronx-distributed-inference, and `nxdi_layout`: how their weights lie
- `tracing`: a layer compiled into a file; `traced`: such a file as a port
"""
