"""Slices: plans, cutting a slice out, and runs along a plan.

| group | measures |
|---|---|
| planning | plans that are found, valid, near the optimum, and quick |
| extracting | speed of cutting a slice out, against `cp`, and its memory |
| running | bytes that a rank reads, and time of two ranks against one process |

Exit code: 1 if a goal is missed, 2 for wrong usage, 3 if a measurement could not run.
"""

from __future__ import annotations

import sys

from groups import run_groups

# Figures by group, for --only. A group is a file in slices/, and yields more figures than these.
GROUPS = {
    "planning": (
        "feasible_plans_found",
        "invalid_plans",
        "slowest_stage_over_optimum",
        "plan_62_layers_64_nodes_ms",
    ),
    "extracting": ("extract_over_cp", "extract_peak_anonymous_mb"),
    "running": ("bytes_read_over_slice", "two_ranks_over_one"),
}

if __name__ == "__main__":
    sys.exit(run_groups("slices", __doc__, GROUPS))
