"""Growth of processor time and memory with layers, tokens, experts, and captures in a folder.

Each command runs at three sizes of an axis, each twice the one before, on synthetic models of hidden size 256. The
growth of time is the exponent e of time ~ size^e. It comes from differences, (t3 - t2) over (t2 - t1), because a
command also takes time to start. The rounds alternate between the sizes; a time is the least of its rounds, since other
work on the machine only adds to it, and a figure of many captures is a median. Memory is the peak of anonymous memory
at the largest size over that at the least.

A golden is streamed on the CPU; a sweep runs on the CPU; `diagnose` looks at every layer of a run whose gate and up
weights are swapped. Tokens come in prompts of 64, because attention alone grows with the square of a prompt's length.

With `--calls` the calls of Python functions in the main thread are counted instead of time (cProfile): other work on
the machine does not change them, and a loop over all tensors for each layer shows. Libraries' own loops do not.

    python scripts/bench_growth.py --axes layers,experts
"""

from __future__ import annotations

import math
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_golden import write_model
from figures import Figure, benchmark_parser, names_among, print_figures
from peaks import Watched, package_environment, watch_package
from port_runs import EXAMPLES

from minimax_tools.capture.store import DEVICE_SIDE, GOLDEN_SIDE, capture_directory
from minimax_tools.synthetic.toy_model import SyntheticModel

_PROMPT_LENGTH = 64
_SWAPPED_PORT = f"{EXAMPLES / 'swapped_device_layer.py'}:SwappedDeviceLayer"
# Captures in a folder, and the goal for a command that takes the newest of them.
_MOST_CAPTURES, _MOST_LISTING_S = 2000, 2.0
# Goals: linear growth, with room for noise, and memory that does not grow with layers or captures.
_MOST_EXPONENT, _MOST_MEMORY_RATIO = 1.15, 1.15


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


# Three sizes of each axis, each twice the one before. Time must differ by more than its noise.
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
CAPTURES = "captures"


def main() -> int:
    """Measure, print, and return 1 if a goal is missed, else 0."""
    parser = benchmark_parser(__doc__)
    axes = (*AXES, CAPTURES)
    parser.add_argument(
        "--axes", type=names_among(axes), default=set(axes), help="axes to measure (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command and size (default: 3)")
    parser.add_argument(
        "--calls", action="store_true", help="count calls of Python functions in place of time"
    )
    parser.add_argument("--scratch", type=Path, help="folder with 4 GB free (default: the system's)")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    for axis in axes:
        if axis in arguments.axes:
            with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
                if axis == CAPTURES:
                    figures += measure_captures(axis, Path(scratch), num_rounds=arguments.rounds)
                elif arguments.calls:
                    figures += count_axis(axis, Path(scratch))
                else:
                    figures += measure_axis(axis, Path(scratch), num_rounds=arguments.rounds)
    return print_figures("growth", figures, as_json=arguments.json)


def measure_axis(axis: str, scratch: Path, *, num_rounds: int) -> Iterator[Figure]:
    """Yield growth of time and memory of every command along an axis."""
    folders = {size: scratch / str(number) for number, size in enumerate(AXES[axis])}
    runs: dict[str, dict[Size, list[Watched]]] = {
        command: {size: [] for size in folders} for command in COMMANDS
    }
    for size, folder in folders.items():
        write_model(folder / "model", size.model)
    for round_ in range(num_rounds):
        for size, folder in folders.items():
            for command, words in lines_of(folder, size).items():
                runs[command][size].append(measure(words, folder, round_))
    for command, by_size in runs.items():
        sizes = tuple(by_size.values())
        yield from growth_figures(f"{command}_{axis}", sizes, is_memory_flat=axis == "layers")


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


def measure(words: Sequence[str], folder: Path, round_: int) -> Watched:
    """Run a command in a process of its own, without what an earlier round left."""
    written = {"extract-all": folder / "golden", "sweep": folder / "run"}.get(words[1])
    if written is not None and round_:
        shutil.rmtree(written)
    quiet = [] if words[1] == "show" else ["--quiet"]
    watched = watch_package(*words, *quiet)
    # A sweep, a comparison and a diagnosis of a wrong port end with 1.
    if watched.exit_code not in (0, 1):
        sys.exit(f"{' '.join(words)} ended with {watched.exit_code}")
    print(
        f"{words[0]} {words[1]}: {watched.cpu_s:.2f} s, {watched.peak_anonymous_bytes / 1e6:.0f} MB",
        file=sys.stderr,
    )
    return watched


def growth_figures(
    name: str, sizes: Sequence[Sequence[Watched]], *, is_memory_flat: bool
) -> Iterator[Figure]:
    """Yield a command's growth along an axis, of which `sizes` hold all rounds."""
    seconds = [min(watched.cpu_s for watched in rounds) for rounds in sizes]
    memory = [statistics.median(watched.peak_anonymous_bytes for watched in rounds) for rounds in sizes]
    first, second = seconds[1] - seconds[0], seconds[2] - seconds[1]
    yield Figure.plain(f"{name}_cpu_s", seconds[-1])
    if min(first, second) < 0.1 * seconds[0]:
        # Time does not grow by more than noise: an exponent would be one of noise.
        yield Figure.at_most(f"{name}_time_over_least", seconds[-1] / seconds[0], 4 * _MOST_EXPONENT)
    else:
        yield Figure.at_most(f"{name}_time_exponent", math.log2(second / first), _MOST_EXPONENT)
    limit = _MOST_MEMORY_RATIO if is_memory_flat else 4.0
    yield Figure.at_most(f"{name}_memory_over_least", memory[-1] / memory[0], limit)


def measure_captures(axis: str, scratch: Path, *, num_rounds: int) -> Iterator[Figure]:
    """Yield what a comparison of the newest captures takes more in a folder of many captures than in one of two."""
    size = Size(layers=1, tokens=64)
    captures, model = scratch / "captures", scratch / "model"
    write_model(model, size.model)
    golden = capture_directory(captures, GOLDEN_SIDE, "capture_0")
    run = capture_directory(captures, DEVICE_SIDE, "capture_0")
    for words in (
        ("gpu_reference", "extract-all", "--seq-len", size.seq_lens, "--output-dir", str(golden)),
        ("neuron", "sweep", "--golden", str(golden), "--backend", "cpu", "--output-dir", str(run)),
    ):
        measure([*words, "--model", str(model)], scratch, 0)
    compare = ["compare", "--captures", str(captures)]
    alone = [measure(compare, scratch, 0) for _ in range(num_rounds)]
    for capture in (golden, run):
        for number in range(1, _MOST_CAPTURES // 2):
            shutil.copytree(capture, capture.with_name(f"capture_{number}"), copy_function=os.link)
    among = [measure(compare, scratch, 0) for _ in range(num_rounds)]
    more_s = statistics.median(watched.cpu_s for watched in among) - statistics.median(
        watched.cpu_s for watched in alone
    )
    yield Figure.at_most(f"compare_newest_of_{_MOST_CAPTURES}_{axis}_more_cpu_s", more_s, _MOST_LISTING_S)
    ratio = statistics.median(watched.peak_anonymous_bytes for watched in among) / statistics.median(
        watched.peak_anonymous_bytes for watched in alone
    )
    yield Figure.at_most(f"compare_newest_of_{_MOST_CAPTURES}_{axis}_memory_ratio", ratio, _MOST_MEMORY_RATIO)


if __name__ == "__main__":
    sys.exit(main())
