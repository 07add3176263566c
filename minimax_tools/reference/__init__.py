"""The reference: what a MiniMax-M2 computes, to be trusted and read.

- `layer`: mm2's own decoder layer in plain PyTorch, every site exposed; `own_layer`: the same, one expert in memory
- `modules`: transformers' own modules, and where the sites show in them
- `module_tree`: how any model that transformers knows names its parts
- `causal_model`: any causal language model of transformers, whole; `causal_part`: some layers of one, with
  `stand_ins` for the rest, told apart by its `anatomy`
- `twin`: transformers' layer in float32 beside the BF16 one, for the noise floor, a `lone_layer` that is fed by hand
- `variants`: samples of other right ways to compute a layer in BF16, copies of a `rounded_layer` that differ in their
  `rounding`; `upcast`: its experts, and the twin's, in float32
- `trainee`: transformers' whole MiniMax-M2 in float32, to be trained
- `head`: final norm and lm_head in float32, a slab at a time
"""
