"""The catalogue of known porting mistakes: each a name, a sentence, what to look at, and a change of the layer.

- `catalogue`: all of them, by name
- `norms`: the block norms and those of queries and keys; `rope`: rotary embedding
- `rope_positions`: the positions that it turns by
- `attention`: scores, masks, heads; `residual`: o_proj and the residual stream
- `router`: the choice of experts and their weights; `experts`: what experts compute, and which of them do
- `fp8`: codes and scales; `low_bits`: numbers rounded to fewer bits, as mistakes round them
- `splits`: ranks and parts of a width, as parameters
"""
