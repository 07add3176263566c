"""mm2's own decoder layer for a device: `layer`, and its experts in `moe`.

On several ranks `head_layout` says which heads each holds, and `rank_cut` reads its part of the weights.
"""
