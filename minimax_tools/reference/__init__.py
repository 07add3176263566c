"""MiniMax-M2's decoder layer and head, computed in ways that goldens and ports are held against.

- `layer`: the decoder layer as a plain torch module, every site exposed
- `float32_stages`: the decoder layer in float32 as a graph, one function for each site
- `modules`: transformers' own modules, and which module shows each site
- `twin`: transformers' layer by itself, in float32, for the noise floor
- `upcast`: experts in float32 from weights of fewer bits
- `rounding`: rounding of a batch's copies; final norm and lm_head in float32
- `rounded_layer`: copies of a layer that round in their own ways
- `rounded_model`: such copies of the whole model, chained from the embedding to the logits, some with the flips that
  noise may cause
- `evaluation`: the float32 layer as a graph of which a change replaces stages
- `expert_pass`: the experts of many such layers at once; a layer's weights, FP8 codes too
- `right_stages`: the right values of stages from a port's own inputs of them; where its mistake is cut off
- `variant_names`: the names of samples of other right ways to compute a layer
"""
