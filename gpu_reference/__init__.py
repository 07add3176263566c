"""Golden captures: transformers' model run on trusted hardware, and certified; the command `mm2-gpu`.

- `golden`: the model run once, and captured layer by layer with its noise floor
- `model`: transformers' model, placed, loaded, and proved
- `streaming`: the model run with one layer's weights in memory
- `pipeline`: the model run by several processes, each with one slice of a plan
- `certification`: the check of a finished golden
- `export`: goldens written as reference captures of other tools
- `readiness`: a machine before a golden is made on it
- `publication`: goldens put at remote addresses
- `commands`, `options`, `cli`, `__main__`: the command
"""

from __future__ import annotations
