"""Processor time and memory of a command before it works.

Every command of every program is started in its own process, several times. A command's figure is the median of its
starts, and the printed figures are the worst of all commands: of its help, an error of usage and a completion.
Beside them stand Python alone, and Python with torch, as of a command that loads its libraries. Linux counts this
script's own memory, some 25 MB, in each peak as the least.

    python scripts/bench_start.py
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
from figures import Figure, benchmark_parser, print_figures
from peaks import watch

# The package that runs each program, and its command's module and name.
PROGRAMS = {
    "mm2-split": ("minimax_tools", "minimax_tools.cli", "mm2_split"),
    "mm2-test": ("neuron", "neuron.cli", "main"),
    "mm2-gpu": ("gpu_reference", "gpu_reference.cli", "main"),
    "mm2-compare": ("compare", "compare.cli", "main"),
    "mm2-diagnose": ("compare.diagnosis", "compare.diagnosis.cli", "main"),
}
# Goals of each command.
MOST_CPU_S, MOST_MB = 0.35, 80.0
_MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Medians of several starts of one command line."""

    line: str
    cpu_s: float  # processor time, of children too
    resident_mb: float  # peak of resident memory of the largest process


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--starts", type=int, default=3, help="starts of each command (default: 3)")
    arguments = parser.parse_args()
    commands = dict(list_commands())
    figures = []
    for what, option, exit_code in (("help", "--help", 0), ("error of usage", "--no-such-option", 2)):
        starts = [
            measure(line, [*words, option], num_starts=arguments.starts, exit_code=exit_code)
            for line, words in commands.items()
        ]
        figures += worst_figures(what, starts)
    starts = [
        measure(line, words, environment=completing(line), num_starts=arguments.starts)
        for line, words in commands.items()
    ]
    figures += worst_figures("completion", starts)
    for what, program in (("Python alone", "pass"), ("Python with torch", "import torch")):
        start = measure(what, [sys.executable, "-c", program], num_starts=arguments.starts)
        figures += [
            Figure.plain(f"{what}, s of processor time", start.cpu_s),
            Figure.plain(f"{what}, MB resident", start.resident_mb),
        ]
    figures.append(Figure.plain("commands measured", len(commands)))
    return print_figures("start", figures, as_json=arguments.json)


def list_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield every command's name, and the words that run it."""
    for program, (package, module, attribute) in PROGRAMS.items():
        root = getattr(importlib.import_module(module), attribute)
        words = [sys.executable, "-m", package]
        names = root.list_commands(click.Context(root)) if isinstance(root, click.Group) else []
        yield program, words
        yield from ((f"{program} {name}", [*words, name]) for name in names)


def completing(line: str) -> dict[str, str]:
    """Return the environment in which bash asks a command for its options."""
    program = line.partition(" ")[0]
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    return {
        **os.environ,
        variable: "bash_complete",
        "COMP_WORDS": f"{line} --",
        "COMP_CWORD": str(len(line.split())),
    }


def measure(
    line: str,
    words: Sequence[str],
    *,
    num_starts: int,
    environment: Mapping[str, str] | None = None,
    exit_code: int = 0,
) -> Start:
    """Start a command several times.

    Raises:
        RuntimeError: It ends with another exit code.
    """
    watched = [watch(words, environment=environment, with_errors=False) for _ in range(num_starts)]
    codes = {one.exit_code for one in watched}
    if codes != {exit_code}:
        raise RuntimeError(f"{line}: exit code {codes}, expected {exit_code}")
    return Start(
        line=line,
        cpu_s=statistics.median(one.cpu_s for one in watched),
        resident_mb=statistics.median(one.peak_resident_bytes for one in watched) / _MB,
    )


def worst_figures(what: str, starts: Sequence[Start]) -> list[Figure]:
    """Return the worst time and the worst memory of all commands, each with its command's name."""
    slowest = max(starts, key=lambda start: start.cpu_s)
    largest = max(starts, key=lambda start: start.resident_mb)
    return [
        Figure.at_most(f"{what}, s of processor time ({slowest.line})", slowest.cpu_s, MOST_CPU_S),
        Figure.at_most(f"{what}, MB resident ({largest.line})", largest.resident_mb, MOST_MB),
    ]


if __name__ == "__main__":
    sys.exit(main())
