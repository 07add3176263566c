"""Judging: values of one site to a result.

- `layer_judge`: the sites of one layer
- `model_judge`: the sites outside the layers
- `judge`: one site's values
- `noise_judge`: figures against limits
- `routing`: expert sets, and flips that noise explains
- `replay`: the golden with the port's own experts
- `derived_choice`: experts that a port does not show, from its router
- `nearest_choice`: the same from the experts' output
- `logits`: next-token distributions
- `generated`: generated tokens
- `router_dtypes`: dtypes that the port's router is held in
- `coverage`: layers that a pass proves right
"""
