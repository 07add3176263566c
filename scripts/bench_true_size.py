"""One layer of the true dimensions through the whole path: golden, device run, verdict; and with a mistake.

Writes a one-layer FP8 checkpoint (6.1 GB with embedding and lm_head), captures its golden with the noise
floor, runs mm2's device layer on `xla-cpu`, judges it, and does the same with gate and up swapped. Every
command is a process of its own; its anonymous memory (what cannot be dropped, unlike cached file pages)
and its resident memory are sampled. Memory is given in layers of 7.34 GB, the weights of one layer in
BF16: the least that must be held.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, print_figures
from peaks import Watched, watch

LAYER_BYTES = 7_339_011_072
MEMORY_LIMIT_BYTES = 24 << 30
SWAPPED = Path(__file__).parent / "examples" / "swapped_device_layer.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A command that ran, and what it took."""

    name: str
    watched: Watched


def main() -> int:
    """Run, print, and end with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scratch", type=Path, help="folder with 10 GB free (default: the system's)")
    parser.add_argument("--seq-len", default="40,24", help="row lengths (default: %(default)s)")
    parser.add_argument("--backend", default="xla-cpu", help="device of the runs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        runs = run_all(Path(scratch), seq_len=arguments.seq_len, backend=arguments.backend)
    figures = [figure for run in runs for figure in figures_of(run)]
    return print_figures("true_size", figures, as_json=arguments.json)


def run_all(scratch: Path, *, seq_len: str, backend: str) -> list[Measured]:
    """Every command of the path, in order."""
    model, golden = scratch / "model", scratch / "golden"
    clean, faulty = scratch / "clean", scratch / "faulty"
    device = [
        "mm2-test",
        "single-layer",
        "--layer",
        "0",
        "--model",
        model,
        "--golden",
        golden,
        "--backend",
        backend,
    ]
    compare = ["mm2-compare", "--gpu-path", golden]
    return [
        measure(
            "synthesize",
            0,
            ["mm2-split", "synthesize", "--preset", "m2", "--num-hidden-layers", "1", "--output", model],
        ),
        measure(
            "golden",
            0,
            [
                "mm2-gpu",
                "single-layer",
                "--layer",
                "0",
                "--model",
                model,
                "--seq-len",
                seq_len,
                "--output-dir",
                golden,
            ],
        ),
        measure("device", 0, [*device, "--output-dir", clean]),
        measure("compare", 0, [*compare, "--neuron-path", clean]),
        measure(
            "device_swapped",
            1,
            [*device, "--target", f"{SWAPPED}:SwappedDeviceLayer", "--output-dir", faulty],
        ),
        measure("compare_swapped", 1, [*compare, "--neuron-path", faulty]),
    ]


def measure(name: str, expected_code: int, command: list[object]) -> Measured:
    """Run a command and sample its memory; stop the benchmark if it ends otherwise than expected."""
    words = [str(word) for word in command]
    beside = Path(sys.executable).parent / words[0]
    watched = watch([str(beside) if beside.exists() else words[0], *words[1:]])
    print(f"{name}: {watched}", file=sys.stderr)
    if watched.exit_code != expected_code:
        sys.exit(f"{name} ended with {watched.exit_code}, expected {expected_code}: {' '.join(words)}")
    return Measured(name=name, watched=watched)


def figures_of(run: Measured) -> list[Figure]:
    """A run's figures: time, and memory in layers and against the machine's."""
    limit, took = MEMORY_LIMIT_BYTES / LAYER_BYTES, run.watched
    anonymous = took.peak_anonymous_bytes / LAYER_BYTES
    resident = took.peak_resident_bytes / LAYER_BYTES
    return [
        Figure.plain(f"{run.name}_wall_s", took.wall_s),
        Figure.plain(f"{run.name}_cpu_s", took.cpu_s),
        Figure.at_most(f"{run.name}_peak_anonymous_over_layer", anonymous, limit),
        Figure.plain(f"{run.name}_peak_resident_over_layer", resident),
    ]


if __name__ == "__main__":
    sys.exit(main())
