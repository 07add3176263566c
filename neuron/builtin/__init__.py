"""The builtin target: mm2's own decoder layer for a device.

- `layer`: the layer, with its attention
- `modules`: norms, projections, and an MLP that every token takes
- `moe`: the layer's mixture of experts
- `rank_cut`: a rank's part of a tensor, read without the rest; the attention heads that each of several ranks holds
"""
