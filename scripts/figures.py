"""Figures that a benchmark prints, as a table or with `--json` as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measured figure and its goal."""

    figure: str  # name of the figure
    value: float
    goal: str = "-"  # the goal as text; `-` without one
    holds: bool = True  # False if the goal is missed

    @classmethod
    def plain(cls, figure: str, value: float) -> Figure:
        """Build a figure without a goal."""
        return cls(figure=figure, value=round(value, 4))

    @classmethod
    def at_most(cls, figure: str, value: float, limit: float) -> Figure:
        """Build a figure that must not exceed a limit."""
        return cls(figure=figure, value=round(value, 4), goal=f"<= {limit:g}", holds=value <= limit)

    @classmethod
    def at_least(cls, figure: str, value: float, limit: float) -> Figure:
        """Build a figure that must not fall below a limit."""
        return cls(figure=figure, value=round(value, 4), goal=f">= {limit:g}", holds=value >= limit)

    @classmethod
    def share(
        cls, figure: str, hits: Sequence[bool], *, at_least: float | None = None, at_most: float | None = None
    ) -> Figure:
        """Build the share of hits in percent, with one goal or none; 0 without cases."""
        value = 100 * sum(hits) / len(hits) if hits else 0.0
        if at_least is not None:
            return cls.at_least(figure, value, at_least)
        return cls.plain(figure, value) if at_most is None else cls.at_most(figure, value, at_most)

    @classmethod
    def exactly(cls, figure: str, value: float, wanted: float) -> Figure:
        """Build a figure that must be one value."""
        return cls(figure=figure, value=round(value, 4), goal=f"= {wanted:g}", holds=value == wanted)


def benchmark_parser(
    description: str | None, *, scale: bool = False, scratch: str = ""
) -> argparse.ArgumentParser:
    """Build the parser of a benchmark, whose help is the script's docstring; it has the option `--json`.

    With `scale` it has the option `--scale`. `scratch` says what the folder of the option `--scratch` must have.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if scale:
        parser.add_argument(
            "--scale",
            choices=("full", "toy"),
            default="full",
            help="size of the measurement; toy tries the script out quickly (default: %(default)s)",
        )
    if scratch:
        parser.add_argument("--scratch", type=Path, help=f"folder with {scratch} (default: the system's)")
    return parser


def run_groups(
    name: str, description: str | None, groups: Mapping[str, Callable[[str], Iterator[Figure]]]
) -> int:
    """Measure groups of figures at a scale, and print them.

    Returns:
        The benchmark's exit code: 1 if a goal is missed, 3 if a measurement could not run, else 0.
    """
    from minimax_tools.errors import Mm2Error

    parser = benchmark_parser(description, scale=True)
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, help="groups (default: all)")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    try:
        for group in arguments.only:
            print(f"{group} …", file=sys.stderr)
            figures += groups[group](arguments.scale)
    except Mm2Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return 3
    return print_figures(name, figures, as_json=arguments.json)


def print_figures(benchmark: str, figures: Sequence[Figure], *, as_json: bool) -> int:
    """Print the figures of a benchmark; return its exit code: 1 if a goal is missed, else 0."""
    if as_json:
        rows = [asdict(figure) for figure in figures]
        print(json.dumps({"benchmark": benchmark, "machine": describe_machine(), "figures": rows}, indent=1))
    else:
        print(describe_machine())
        for figure in figures:
            outcome = "" if figure.goal == "-" else ("holds" if figure.holds else "MISSED")
            print(f"{figure.figure:55} {figure.value:10.3f}  goal {figure.goal:12} {outcome}".rstrip())
    return 0 if all(figure.holds for figure in figures) else 1


def describe_machine() -> str:
    """Describe this machine in words."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.platform()}, Python {platform.python_version()}"
    )
