"""The diagnosis: which known mistake explains a layer's output; the command `mm2-diagnose` (`cli`).

- `diagnose`: the library's entry: two captures and a checkpoint in, a `Diagnosis` (`finding`) out
- `catalogue`: the mistakes; `mistake`: what an entry is, and a hypothesis: an entry with parameters
- `evaluation`: the layer in float32 as a graph of `stages`, of which a hypothesis replaces some
- `layer_weights`, `expert_pass`: the weights, read once; the experts of many hypotheses run together
- `layer_case`: what judges one layer's hypotheses; `yardstick`: errors in units of the noise, at one site
- `trial`: the scores of hypotheses; `fitting`: their parameters; `search`: from all hypotheses to the best
- `naming`: what counts as an explanation
- `model`: the same outside the layers: embedding, final norm and head
- `layer_group`: layers told together; `report`: the text and JSON, with `mistake_text` and `site_report`
"""
