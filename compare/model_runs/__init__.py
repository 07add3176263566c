"""A whole port's run, judged beyond the sites of its layers.

- `passes`: the tokens of the prefill and of each decoding step, and the first pass that is wrong
- `layer_order`: the order of the layers, and the stream between them
- `classes`: modules that another device gets in another class
- `choices`: tokens that the port chose, padded logits, and prompts that were run twice
"""
