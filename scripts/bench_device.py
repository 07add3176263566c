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

from groups import run_groups

# Figures by group, for --only. A group is a file in device/, and yields more figures than these.
GROUPS = {
    "sweeping": (
        "graphs_for_62_layers",
        "compiles_after_first_layer",
        "sweep_over_bare",
        "sweep_over_uncompared",
    ),
    "true_size": ("true_size_sweep_over_bound",),
    "regrouping": ("regroup_peak_over_output", "regroup_over_memcpy", "regroup_transposed_over_memcpy"),
    "bisection": ("bisect_runs_62", "bisect_found_of_three", "bisect_runs_62_clean"),
}

if __name__ == "__main__":
    sys.exit(run_groups("device", __doc__, GROUPS))
