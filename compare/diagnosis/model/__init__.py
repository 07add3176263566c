"""Diagnosis outside the layers: which known mistake explains a port's embedding, final norm or logits.

- `catalogue`: the mistakes, of `embedding`, `final_norm` and `head`; `mistake`: what an entry is; `shards`: vocabulary
  rows that ranks mistake for others; `low_precision`: rows in fewer bits
- `weights`: the checkpoint's tensors outside the layers; `scene`: what a mistake is computed from, and the error's unit
- `case`: both captures' values of one site, from the port's own input; `search`: the mistakes that explain it
"""
