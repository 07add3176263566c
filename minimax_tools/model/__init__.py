"""The graph, quantities, sites and runs of a model, without any tensor of a checkpoint.

- `graph`: what decoder layers compute, as options in which families differ
- `family`: a description of models with one graph, and keys of config.json that describe another
- `families`: the descriptions of all families
- `rope`: the rotary embedding that config.json describes
- `quantisation`: the quantisation that config.json names
- `spec`: quantities of config.json, checked
- `weight_names`: names, shapes and sizes of a layer's tensors
- `stored_names`: the names under which a family's checkpoints store them
- `router`: scores, choice and weights of experts
- `architecture`: module paths of a model, for MiniMax-M2 and other families
- `sites`: named points of a layer and of the model; `formulas`: the computation of each in a line
- `site_layouts`: how ranks share a site, and the place of a site as a text names it
- `span`: a range of layers
- `run`: layers, mode and sites of a run; parts of a layer that can run alone
- `inputs`: the padded token rows of a run
"""
