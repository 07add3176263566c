"""A whole port's run, judged beyond the sites of its layers.

- `passes`: the tokens of the prefill and of each decoding step, and the first pass that is wrong; next tokens by
  pass, against the golden itself
- `stream`: what each layer, and the final norm, is given; the order of the layers
- `cache`: keys and values in the cache, after the prefill and each step
- `cache_mistakes`: the catalogue of what a cache's content shows
- `decoding`: the known mistake that explains a layer's decoded tokens
- `decoding_mistakes`: the catalogue of these mistakes
- `cached_attention`: attention of decoded tokens over a cache, right or wrong
- `choices`: tokens that the port chose, and padded logits; the rule that explains all wrongly chosen tokens
- `chunks`: the run in passes of several tokens behind a cache, joined to that of the steps; prompts that were
  computed more than once, and what their logits depend on
"""
