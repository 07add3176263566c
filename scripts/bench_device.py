"""The device side: sweeps, regrouping of experts, and bisections.

| group | measures |
|---|---|
| sweeping | graphs of 62 layers, compiles after the first, and the time of a sweep over that of a bare loop |
| true_size | time of a sweep over two layers of the true size over that of reading or running them; 7.4 GB of disk |
| regrouping | time of copying experts into grouped storage over that of a plain copy, and its memory |
| bisection | number of runs that find one wrong layer of 62, and three |

Exit code: 1 if a goal is missed, 2 for wrong usage, 3 if a measurement could not run.
"""

from __future__ import annotations

import sys

from device import bisection, regrouping, sweeping
from figures import run_groups

GROUPS = {
    "sweeping": sweeping.measure,
    "true_size": sweeping.measure_true_size,
    "regrouping": regrouping.measure,
    "bisection": bisection.measure,
}

if __name__ == "__main__":
    sys.exit(run_groups("device", __doc__, GROUPS))
