"""Checkpoints in the hub's layout: indexed, read, dequantised and told apart.

- `expected_tensors`: the tensors of a MiniMax-M2, from config.json alone
- `header`: the table of one safetensors shard; byte ranges of tensors
- `weight_files`: the weight files of a checkpoint, and the claims of its index
- `index`: the shard and offset of each tensor
- `shard_files`: bytes of shards, through the page cache or past it; layers fetched before they are needed
- `reader`: tensors and weights, read exactly
- `pickled`: PyTorch's `.bin` files
- `fp8`: dequantisation
- `layer_faults`: tensors of a layer that do not fit config.json, by their cause
- `layer_tensors`: a decoder layer, or a whole model, as a mapping
- `filling`: the engine that fills storage from a checkpoint, for goldens and devices
- `layer_loader`: a golden's layers, loaded one after the other into memory that is used again
- `fingerprint`: digests that tell models apart
"""
