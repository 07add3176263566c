"""Checkpoints that have learnt: text to train on, the training, and changes that keep what a model computes.

- `corpus`: text that is on every machine, in passages; `token_stream`: its token ids, drawn from by a seed
- `training`: AdamW, and the router's bias moved by load; `massive_channels`: what a wide model is given to train with
- `evaluation`: held-out text, and how experts differ
- `learned_weights`: trained tensors as BF16 or block FP8; `learned`: the checkpoint with its held-out prompts
- `equivalent`: changes that keep what a model computes; `rewriting`: a checkpoint written again with them
"""
