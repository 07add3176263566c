"""A whole port's run, judged beyond the sites of its layers.

- `passes`: the tokens of the prefill and of each decoding step, and the first pass that is wrong; next tokens by
  pass, against the golden itself
- `stream`: what each layer, and the final norm, is given; the order of the layers
- `cache`: keys and values in the cache, after the prefill and each step
- `own_cache`: decoded tokens over the right keys and values, or over what the cache holds
- `findings`: findings made of the catalogue's words, and joined to a comparison
- `choices`: tokens that the port chose, and padded logits; the rule that explains all wrongly chosen tokens
- `chunks`: the run in passes of several tokens behind a cache, joined to that of the steps; prompts that were
  computed more than once, and what their logits depend on
"""
