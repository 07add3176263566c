"""The quantities, sites and runs of a MiniMax-M2, without any tensor of a checkpoint.

- `config_file`: config.json and its like, read
- `spec`: quantities of config.json, checked
- `weight_names`: names, shapes and sizes of a layer's tensors
- `architecture`: module paths of a model, for MiniMax-M2 and other families
- `param_mapper`: the part of a model that a tensor belongs to
- `sites`: named points of a layer and of the model
- `site_layouts`: how ranks share a site: assembly of their pieces, and cutting into pieces
- `span`: a range of layers
- `run`: layers, mode and sites of a run
- `inputs`: the padded token rows of a run
"""
