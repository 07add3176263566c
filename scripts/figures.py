"""Figures: what every benchmark prints, for people and with `--json` for machines."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure, and the goal it is held against; `-` where it has none."""

    figure: str
    value: float
    goal: str = "-"
    holds: bool = True


def print_figures(benchmark: str, figures: Sequence[Figure], *, as_json: bool) -> int:
    """Print the figures of a benchmark; the exit code is 1 where a goal is missed."""
    if as_json:
        rows = [asdict(figure) for figure in figures]
        print(json.dumps({"benchmark": benchmark, "machine": describe_machine(), "figures": rows}, indent=1))
    else:
        print(describe_machine())
        for figure in figures:
            outcome = "holds" if figure.holds else "MISSED"
            print(f"{figure.figure:55} {figure.value:10.3f}  goal {figure.goal:12} {outcome}")
    return 0 if all(figure.holds for figure in figures) else 1


def describe_machine() -> str:
    """The machine in words."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.platform()}, Python {platform.python_version()}"
    )
