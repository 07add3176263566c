"""Golden captures: transformers' model run on trusted hardware, and certified; the command `mm2-gpu`.

- `golden`: the model run once, and captured layer by layer with its noise floor
- `model`: transformers' model, placed, loaded, and proved
- `streaming`: the model run with one layer's weights in memory
- `pipeline`: the model run by several processes, each with one slice of a plan
- `ranks`: these processes: how they meet, talk, and notice that one died
- `certification`: the check of a finished golden
- `commands`, `options`, `cli`, `__main__`: the command
"""

from __future__ import annotations

import os

# Read when torch is loaded: torch's waiting threads must sleep. Spinning, they would take cores from the threads that
# read the next layer; 2.5 times the processor time was measured.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
