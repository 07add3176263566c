"""Judging: a result for each site, from both sides' values.

- `layer_judge`: the sites of one layer
- `model_judge`: the sites outside the layers
- `judge`: one site's values; figures against limits
- `routing`: the experts of each token, and flips that noise explains
- `port_choice`: experts that a port does not show, from its router or their output; the golden computed with the port's
  own experts
- `logits`: next-token distributions; generated tokens
- `held_weights`: what the port was seen to hold of its weights; dtypes in which the port holds its router
"""
