"""Growth of a command's work with layers, tokens and experts, counted in calls of Python functions.

Each command runs at three sizes of an axis, each twice the one before, on synthetic models of hidden size 256. The
exponent e of calls ~ size^e comes from differences, (c3 - c2) over (c2 - c1), because a command also takes calls to
start. Calls in the main thread are counted by cProfile: other work on the machine does not change them, and a loop over
all tensors for each layer shows. Libraries' own loops do not.

A golden is streamed on the CPU; a sweep runs on the CPU; `diagnose` looks at every layer of a run whose gate and up
weights are swapped. Tokens come in prompts of 64, because attention alone grows with the square of a prompt's length.

    python scripts/bench_growth.py --axes layers experts
"""

from __future__ import annotations

import math
import pstats
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_golden import write_model
from figures import Figure, benchmark_parser, print_figures
from peaks import package_environment
from port_runs import EXAMPLES

from minimax_tools.synthetic.toy_model import SyntheticModel

_PROMPT_LENGTH = 64
_SWAPPED_PORT = f"{EXAMPLES / 'swapped_device_layer.py'}:SwappedDeviceLayer"
# The goal: linear growth, with room for noise.
_MOST_EXPONENT = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of everything that a command may grow with."""

    layers: int = 8
    tokens: int = 256
    experts: int = 32

    @property
    def model(self) -> SyntheticModel:
        """The model to make."""
        return SyntheticModel(num_hidden_layers=self.layers, num_local_experts=self.experts)

    @property
    def seq_lens(self) -> str:
        """The option's value for all prompts."""
        return ",".join([str(_PROMPT_LENGTH)] * (self.tokens // _PROMPT_LENGTH))


# Three sizes of each axis, each twice the one before.
AXES: Mapping[str, tuple[Size, ...]] = {
    "layers": tuple(Size(layers=number) for number in (16, 32, 64)),
    "tokens": tuple(Size(tokens=number) for number in (1024, 2048, 4096)),
    "experts": tuple(Size(experts=number) for number in (64, 128, 256)),
}
# Program that writes a profile of a command's function: the profile's path, the module, the words.
_PROFILED = """
import cProfile, importlib, sys
profile = cProfile.Profile()
try:
    profile.runcall(importlib.import_module(sys.argv[2]).main, sys.argv[3:], standalone_mode=False)
except SystemExit:
    pass
profile.dump_stats(sys.argv[1])
"""
COMMANDS = ("golden", "sweep", "compare", "diagnose", "show")


def main() -> int:
    """Count, print, and return 1 if a goal is missed, else 0."""
    parser = benchmark_parser(__doc__, scratch="4 GB free")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES, help="axes (default: all)")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    for axis in arguments.axes:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
            figures += count_axis(axis, Path(scratch))
    return print_figures("growth", figures, as_json=arguments.json)


def count_axis(axis: str, scratch: Path) -> Iterator[Figure]:
    """Yield growth of the number of calls of every command along an axis."""
    calls: dict[str, list[int]] = {command: [] for command in COMMANDS}
    for number, size in enumerate(AXES[axis]):
        folder = scratch / str(number)
        write_model(folder / "model", size.model)
        for command, words in lines_of(folder, size).items():
            calls[command].append(count_calls(words, folder / "profile"))
        shutil.rmtree(folder)
    for command, (least, middle, most) in calls.items():
        yield Figure.plain(f"{command}_{axis}_calls", most)
        exponent = math.log2((most - middle) / max(middle - least, 1))
        yield Figure.at_most(f"{command}_{axis}_calls_exponent", exponent, _MOST_EXPONENT)


def count_calls(words: Sequence[str], profile: Path) -> int:
    """Run a command's function under cProfile in a process of its own; return the number of calls in its main thread.

    `mm2-test` would run a port in a further process, which cProfile does not follow.
    """
    package, *options = words
    command = [sys.executable, "-c", _PROFILED, str(profile), f"{package}.cli", *options]
    subprocess.run(command, env=package_environment(), stdout=subprocess.DEVNULL, check=True)
    calls: int = pstats.Stats(str(profile)).total_calls  # type: ignore[attr-defined]  # typeshed leaves it out
    print(f"{words[0]} {words[1]}: {calls} calls", file=sys.stderr)
    return calls


def lines_of(folder: Path, size: Size) -> dict[str, list[str]]:
    """Return the words of each command, in the order in which they need each other's output."""
    model, golden, run = ("--model", str(folder / "model")), str(folder / "golden"), str(folder / "run")
    stream = ("--stream", "on", "--no-prefetch", "--noise-floor", "full", "--seq-len", size.seq_lens)
    return {
        "golden": ["gpu_reference", "extract-all", *model, *stream, "--output-dir", golden],
        "sweep": [
            "neuron", "sweep", *model, "--golden", golden, "--backend", "cpu", "--target", _SWAPPED_PORT,
            "--output-dir", run,
        ],
        "compare": ["compare", *model, "--golden", golden, "--run", run],
        "diagnose": ["compare.diagnosis", *model, "--golden", golden, "--run", run, "--layer-pattern", "layer_*"],
        "show": ["gpu_reference", "show", golden],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
