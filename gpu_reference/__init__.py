"""Golden captures: transformers' model run on trusted hardware, certified; the command `mm2-gpu` (`cli`).

- `placement`: which device holds which part of the model; `offload`: the weights kept off their device
- `model`: the model loaded with the known traps closed; `certify` proves it
- `streaming`: the model run with one layer's weights in memory; `footprint`: what it takes, whole and streamed;
  `stream_choice`: which of the two
- `golden`: the model run once, written layer by layer: `recording` hooks it, `weights` gives what it computes with to
  `noise_floor`, which measures beside it; `resumption` passes by what is written already
- `pipeline/`: the model run by several ranks, each with a slice of a plan: `steps`, `shared_capture`;
  `once_reader` reads each tensor once
- `generation`: what the model says next
- `certifier`: a finished golden checked before it is trusted (`certify_command`): `checked_capture` reads it,
  `layer_certifier` holds its layers by `golden_checks` against mm2's float32 layer, `tallies` keep what they find;
  `variant_check`: how far other right ways to compute its layers stray; `broken_versions`: libraries that make wrong
  ones
- `options`: those that no other command has
"""

from __future__ import annotations

import os

# Read when torch is loaded: a thread of torch's that waits shall sleep. Spinning, as it would, it takes the core from
# the threads that read the next layer: 2.5 times the processor time was measured.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
