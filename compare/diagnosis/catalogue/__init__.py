"""The catalogue of known porting mistakes: a name, a sentence, where to look, and a change of the layer.

- `catalogue`: all mistakes by name
- `norms`: block norms, and those of queries and keys
- `rope`: rotary embedding; positions that it turns by
- `attention`: scores, masks and heads
- `router`: the choice of experts and their weights
- `experts`: the experts' arithmetic, and which of them run
- `experts_by_number`: experts that are scaled, missing, counted twice or in another order
- `tokens`: values of other tokens
- `fp8`: codes and scales; numbers in fewer bits
- `other_layer`: the weights of another layer; o_proj and the residual stream
- `repairs`: changes of the layer's tensors that undo some of them
- `splits`: ranks and parts of a width, as parameters
"""
