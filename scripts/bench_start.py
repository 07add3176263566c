"""Processor time and memory of a command before it works, and of the work that needs no torch.

Every command of every program is started in its own process, several times. A command's figure is the median of its
starts, and the printed figures are the worst of all commands: of its help, an error of usage and a completion.
`mm2-split` plans a model of the true size from its config.json, and plans, cuts out and verifies slices of a toy.
Beside them stand Python alone, and Python with torch, as of a command that loads its libraries. Linux counts this
script's own memory, some 25 MB, in each peak as the least.

    python scripts/bench_start.py
"""

from __future__ import annotations

import importlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
# Writes the config.json of MiniMax-M2 in FP8 to a path.
_CONFIG_PROGRAM = """
import json, sys, torch
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import TokenIds
ids = TokenIds(bos_token_id=0, eos_token_id=0)
with open(sys.argv[1], "w") as file:
    json.dump(SyntheticModel.m2().config(dtype=torch.float8_e4m3fn, token_ids=ids), file)
"""
SPLIT = (sys.executable, "-m", "minimax_tools")
# Goals of each command.
MOST_CPU_S, MOST_MB = 0.35, 80.0
# Goals of the work without torch; the time is that of a plan of the true size.
MOST_PLAN_S, MOST_WORK_MB = 1.5, 150.0
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
    figures += work_figures(num_starts=arguments.starts)
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


def work_figures(*, num_starts: int) -> list[Figure]:
    """Return time and memory of the plan of a true-size model, and the most memory of plan, extract and verify."""
    with tempfile.TemporaryDirectory(prefix="mm2-bench-") as name:
        folder = Path(name)
        write_config(folder / "m2")
        subprocess.run(
            [*SPLIT, "synthesize", "--output", str(folder / "toy"), "--quiet"],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        plans = {model: str(folder / f"{model}.json") for model in ("m2", "toy")}
        planning = {
            model: ["plan", "--model", str(folder / model), *nodes_of(memory), "--output", plans[model]]
            for model, memory in (("m2", "260GB"), ("toy", "1GB"))
        }
        slices = str(folder / "slices")
        work = [
            measure(line, [*SPLIT, *words], num_starts=num_starts)
            for line, words in (
                ("plan of 96 103 tensors", planning["m2"]),
                ("plan of the toy", planning["toy"]),
                ("extract", ["extract", "--plan", plans["toy"], "--all-nodes", "--output", slices]),
                ("verify", ["verify", "--plan", plans["toy"], "--slices", slices]),
            )
        ]
        largest = max(work, key=lambda start: start.resident_mb)
        return [
            Figure.at_most(f"{work[0].line}, s of processor time", work[0].cpu_s, MOST_PLAN_S),
            Figure.at_most(
                f"plan, extract and verify, MB resident ({largest.line})", largest.resident_mb, MOST_WORK_MB
            ),
        ]


def write_config(folder: Path) -> None:
    """Write the config.json of MiniMax-M2 in FP8 to a new folder."""
    folder.mkdir()
    # In another process: torch would count in the memory of all that is started afterwards.
    subprocess.run([sys.executable, "-c", _CONFIG_PROGRAM, str(folder / "config.json")], check=True)


def nodes_of(memory: str) -> list[str]:
    """Return the options of two nodes with so much memory each."""
    return [word for name in "ab" for word in ("--node", f"{name}:memory={memory}")]


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
