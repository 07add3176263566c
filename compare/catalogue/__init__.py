"""The catalogue of known porting mistakes, and what each does, by the place where it acts.

- `words`: names, sentences and places, from `mistakes.toml`, without torch; the list of `mm2-diagnose --list`
- `catalogue`: all mistakes within a layer, by name
- `mistake`: an entry of the catalogue; a hypothesis: an entry with parameters
- `candidates`: parameters that are tried, such as numbers of ranks
- `clues`: what the port's values say by themselves, by which some mistakes find their parameters
- `norms`: block norms, and those of queries and keys
- `rope`: rotary embedding, and the positions that it turns by
- `attention`: scores, masks and heads; the residual stream
- `router`: the choice of experts and their weights
- `experts`: the experts' arithmetic; which of them run, and whose weights they hold
- `tokens`: values of other tokens
- `misread`: FP8 codes and scales; the weights of another layer
- `low_bits`: numbers rounded to fewer bits
- `repairs`: changes of the layer's tensors that undo some of them
- `undo`: a mistake to undo, as `mm2-test --undo` takes it
- `outside`: mistakes of the embedding, the final norm and the head
- `decoding`: mistakes of what decoded tokens read of a cache
- `cached_attention`: attention of decoded tokens over a cache, right or wrong
- `cache`: mistakes that a cache's content shows
"""
