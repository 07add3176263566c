"""A causal language model split into bottom, trunk and top, each loaded, run and saved by itself.

- `factory`: all three components from a checkpoint's folder or a hub id (`ModelFactory`)
- `components`: a component as a module that runs (`SplitModel`); `.pt` files of older tools
- `parts`: the components, their decoder layers and devices
- `part_loading`: the shards and tensors that a component needs (`ShardLoader`), and the component's weights from them
- `part_folder`: a saved component
- `causal_part`: a model's config, and a component as transformers' model with stand-ins, proved and filled
- `module_tree`: tensor names of an architecture, read from its tree of modules
"""
