"""Diagnosis outside the layers: the known mistake that explains a port's embedding, final norm or logits.

- `catalogue`: the mistakes by name
- `mistake`: an entry of the catalogue
- `embedding`: mistakes of the embedding
- `final_norm`: mistakes of the final norm
- `head`: mistakes of the head
- `shards`: vocabulary rows that ranks mistake for others
- `weights`: the checkpoint's tensors outside the layers
- `inputs`: the inputs of these sites, on either side
- `site_noise`: the noise of a site, the unit of its errors
- `case`: both captures' values of one site
- `search`: the mistakes that explain it
"""
