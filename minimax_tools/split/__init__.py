"""A causal language model split into bottom, trunk and top, each loaded, run and saved by itself.

- `factory`: all three components from a checkpoint's folder or a hub id (`ModelFactory`)
- `components`: a component as a module that runs (`SplitModel`)
- `parts`: the components and their decoder layers; `devices`: the device of each
- `part_loading`: components from a checkpoint, one by itself or all out of the whole model
- `part_folder`: a saved component; `.pt` files of older tools
- `shard_loader`: the shards and tensors that a component needs (`ShardLoader`)
- `causal_part`: a component as transformers' model with stand-ins; `causal_model`: the whole model and its config;
  the modules before, in and after the layers, found by running the model with stand-ins
- `module_names` and `binding`: which stored tensor fills which parameter
- `module_tree`: tensor names of an architecture, read from its tree of modules
"""
