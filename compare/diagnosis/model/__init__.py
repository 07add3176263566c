"""Diagnosis outside the layers: the known mistake that explains a port's embedding, final norm or logits.

- `mistake`: an entry of the catalogue; the inputs of these sites, on either side; the checkpoint's tensors outside
  the layers
- `embedding`: mistakes of the embedding
- `final_norm`: mistakes of the final norm
- `head`: mistakes of the head
- `shards`: vocabulary rows that ranks mistake for others
- `case`: both captures' values of one site; the noise of a site, the unit of its errors
- `search`: the mistakes that explain it; the mistakes by name
"""
