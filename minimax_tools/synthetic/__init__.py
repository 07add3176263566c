"""Checkpoints that mm2 makes: of random numbers, or trained on text.

- `checkpoint`: a checkpoint of any size, written by seed
- `toy_model` and `toy_tokenizer`: its config and its tokenizer
- `random_weights`: its tensors; `random_numbers`: numbers that are the same on every host
- `learned`: a checkpoint that was trained on text
- `corpus`: text to train on, and its token ids
- `trainee` and `training`: the model that is trained, and the training
- `held_out`: text that the model never saw, and the choice of experts
"""
