"""Slices: plans, cutting a slice out, and runs along a plan.

| group | measures |
|---|---|
| planning | plans that are found, valid and quick |
| extracting | speed of cutting a slice out, against `cp`, and its memory |
| running | bytes that a rank reads, and time of two ranks against one process |

Exit code: 1 if a goal is missed, 2 for wrong usage, 3 if a measurement could not run.
"""

from __future__ import annotations

import sys

from figures import run_groups
from slices import extracting, planning, running

if __name__ == "__main__":
    modules = {"planning": planning, "extracting": extracting, "running": running}
    sys.exit(run_groups("slices", __doc__, {name: module.measure for name, module in modules.items()}))
