"""A causal language model taken apart into bottom, trunk and top, each loaded, run and kept by itself.

- `factory`: `ModelFactory`, which makes all three from a checkpoint's folder or a hub's id
- `components`: `SplitModel`, one of them, as a module that runs
- `parts` and `devices`: which layers belong to which, and where each goes
- `part_loading`: from a checkpoint, by itself or out of the whole model; `shards`: the files it needs
- `part_folder`: saved and loaded again; `tensor_file`: the file of its tensors; `seed_file`: older `.pt` files
- `narration`: what a verbose run tells
"""
