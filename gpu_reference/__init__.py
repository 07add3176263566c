"""Golden captures: transformers' model run on trusted hardware, certified; the command `mm2-gpu` (`cli`).

- `placement`: which device holds which part of the model; `offload`: the weights kept off their device
- `model`: the model loaded with the known traps closed; `certify` proves it
- `golden`: the model run once, written layer by layer: `recording` hooks it, `noise_floor` measures beside it
- `generation`: what the model says next
- `options`: those that no other command has
"""
