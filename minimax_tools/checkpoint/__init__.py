"""Checkpoints in the hub's layout: found, indexed, read, dequantised, regrouped, told apart, and made.

header (one shard's table) → index (tensor → shard) → reader (byte-exact reads, FP8 by fp8) → layer_tensors
(one decoder layer as a mapping) → regroup (experts to grouped storage). names holds every tensor's name and
shape, fingerprint tells models apart, hub turns `--model` into a folder, and the synthetic files build small
checkpoints of the same layout.

A layer after the other: weight_size tells what one takes, layer_loader fills its layer_storage on the threads of a
reading_pool while another computes, and read_ahead brings one that will be asked for into the system's page cache.

Any model, in parts: shard_loader finds the shards of a component and reads single tensors of them; weight_files
and weight_map say which files there are and what their index claims, architecture and param_mapper which part
of a model a tensor belongs to, binding plans which tensor fills which parameter of a module (by its module_names),
and pickled reads PyTorch's `.bin` files (pickled_header) without unpickling them.
"""
