"""Training of small MiniMax-M2s on text, for `train_models.py`.

- `text`: the text to train on, and its token ids
- `trainee`: the model that is trained, massive channels planted in it, its training and its evaluation
- `learned`: the trained model as a checkpoint in BF16, FP8 or float32, with a record and prompts
"""
