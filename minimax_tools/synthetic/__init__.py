"""Checkpoints that mm2 makes: of random numbers, or trained on text.

| file | content |
|---|---|
| `checkpoint` | a checkpoint of random numbers, of any size, written by seed |
| `toy_model`, `toy_tokenizer` | config and tokenizer of a made checkpoint |
| `random_weights` | its tensors, and numbers that are the same on every host |
| `learned` | a checkpoint that was trained on text |
| `corpus`, `token_stream` | the text to train on, and its token ids |
| `trainee`, `training` | the model that is trained, and the training |
| `massive_channels` | large channels, planted in a model before its training |
| `learned_weights` | a trained model's tensors in the dtypes of a checkpoint |
| `held_out` | evaluation on text that the model never saw |
"""
