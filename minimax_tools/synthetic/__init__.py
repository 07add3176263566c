"""Checkpoints that mm2 makes of random numbers.

| file | content |
|---|---|
| `checkpoint` | a checkpoint of any size, written by seed |
| `toy_model`, `toy_tokenizer` | config and tokenizer of a made checkpoint |
| `random_weights` | its tensors, and numbers that are the same on every host |
"""
