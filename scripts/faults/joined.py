"""Joined: what other benchmarks counted of wrong things that ended in exit code 0.

A benchmark takes part by printing, with `--json`, the figures `wrong_things` (how many it tried) and `false_passes`
(how many of them ended in 0): damaged goldens, dying ports.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import UsageError

TRIED, PASSED = "wrong_things", "false_passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Another benchmark's counts.

    Args:
        benchmark: Its name.
        num_tried: How many wrong things it tried.
        num_passed: How many of them ended in exit code 0.
    """

    benchmark: str
    num_tried: int
    num_passed: int

    @classmethod
    def read(cls, path: Path) -> Joined:
        """Read what a benchmark printed with `--json`.

        Raises:
            UsageError: The file is not there, or holds no such figures.
        """
        next_step = f"Name what a benchmark printed with --json that counts {TRIED} and {PASSED}."
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            found = {one["figure"]: one["value"] for one in record["figures"]}
            name = str(record["benchmark"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{path} is no benchmark's output", found=str(error), next_step=next_step
            ) from error
        missing = [figure for figure in (TRIED, PASSED) if figure not in found]
        if missing:
            raise UsageError(
                f"{path} does not count {' and '.join(missing)}",
                found=", ".join(sorted(found)),
                next_step=next_step,
            )
        return cls(benchmark=name, num_tried=int(found[TRIED]), num_passed=int(found[PASSED]))
