"""A port of MiniMax-M2's decoder layer.

- `attention`: attention with fused q, k and v
- `experts`: the router, and the experts that it chooses
- `layer`: the layer
"""
