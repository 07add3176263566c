"""The quantities, sites and runs of a MiniMax-M2, without any tensor of a checkpoint.

- `family`: the graph of M2, M2.1, M2.5 and M2.7, and keys that describe another; keys of config.json that mm2 refuses
  by name
- `rope`: the rotary embedding that config.json describes
- `quantisation`: the quantisation that config.json names
- `spec`: quantities of config.json, checked; config.json and its like, read
- `weight_names`: names, shapes and sizes of a layer's tensors
- `architecture`: module paths of a model, for MiniMax-M2 and other families; the part of a model that a tensor
  belongs to
- `sites`: named points of a layer and of the model; the computation of each site from its inputs, in a line
- `site_layouts`: how ranks share a site: assembly of their pieces, and cutting into pieces; the place of a site, as a
  port's `sites` or a map names it
- `span`: a range of layers
- `run`: layers, mode and sites of a run; parts of a layer that can run alone
- `inputs`: the padded token rows of a run
"""
