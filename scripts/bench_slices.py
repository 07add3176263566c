"""Slices: plans against every possible plan, cutting against `cp`, and runs along a plan against a single process.

| group | what it measures |
|---|---|
| planning | whether a plan is found wherever there is one, is valid, near the optimum, and quick |
| extracting | how fast a slice is cut out, and in how much memory |
| running | what a rank reads, and what several ranks gain |

Exit code 1 where a goal is missed, 2 for wrong usage, 3 where it could not run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

from groups import GroupedBenchmark

# Each group is the file of its name in slices/, and gives these figures and some beside them.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "planning": (
            "feasible_plans_found",
            "invalid_plans",
            "slowest_stage_over_optimum",
            "plan_62_layers_64_nodes_ms",
        ),
        "extracting": ("extract_over_cp", "extract_peak_anonymous_mb"),
        "running": ("bytes_read_over_slice", "two_ranks_over_one"),
    }
)
BENCHMARK = GroupedBenchmark(name="slices", description=__doc__, groups=GROUPS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
