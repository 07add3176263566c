"""A layer of the true dimensions through the whole path: golden, device run, verdict, with and without a mistake.

Writes a one-layer FP8 checkpoint (6.1 GB with embedding and lm_head), traces its weights into mm2's device layer, and
captures its golden with the noise floor. Then it runs the device layer, judges it, and does the same with gate and up
swapped. Last, the swapped layer shows its output alone, and `mm2-diagnose` names the mistake.

Each command is a process of its own, whose anonymous and resident memory are sampled. Anonymous memory cannot be
dropped, unlike cached file pages. Memory is given in layers: the BF16 weights of one layer, which must be held at
least, 7.34 GB of MiniMax-M2.

    python scripts/bench_true_size.py --golden-of m3    only the golden of the last of two layers of another preset
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import torch
from figures import Figure, benchmark_parser, print_figures
from peaks import Watched, watch
from port_runs import EXAMPLES

from minimax_tools.model.weight_names import layer_bytes
from minimax_tools.synthetic.toy_model import PRESETS

# Goal for the peak of every command.
MEMORY_LIMIT_BYTES = 24 << 30
# Goal for the golden of another family, in layers.
LAYERS_LIMIT = 1.25
# Goals for processor time: of `mm2-test weights`, and of the diagnosis of 157 tokens.
CPU_LIMITS_S = {"weights": 120, "diagnose_swapped": 60}
# Memory that `mm2-test weights` may take.
WEIGHTS_BUDGET = "15GB"
# Commands that a diagnosis needs, and the diagnosis.
DIAGNOSIS = ("synthesize", "golden", "device_output_swapped", "diagnose_swapped")
# What the diagnosis names.
MISTAKE = "gate_up_swapped"
SWAPPED = EXAMPLES / "swapped_device_layer.py"


def main() -> int:
    """Run and print; return 1 if a goal is missed, else 0."""
    parser = benchmark_parser(__doc__, scratch="10 GB free")
    parser.add_argument("--seq-len", default="40,24", help="tokens of each prompt (default: %(default)s)")
    parser.add_argument(
        "--diagnosis",
        action="store_true",
        help="run only the commands that a diagnosis needs; the goal is for --seq-len 100,57",
    )
    parser.add_argument("--backend", default="xla-cpu", help="device of the runs (default: %(default)s)")
    parser.add_argument(
        "--weights-of",
        type=Path,
        metavar="MODEL",
        help="only trace the weights of layer 0 of this checkpoint",
    )
    parser.add_argument(
        "--golden-of",
        choices=PRESETS,
        metavar="PRESET",
        help="only capture the golden of the last of two layers of this preset, one layer in memory at a time",
    )
    arguments = parser.parse_args()
    preset, limit = arguments.golden_of or "m2", MEMORY_LIMIT_BYTES
    if arguments.golden_of:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
            runs = capture_alone(Path(scratch), preset, seq_len=arguments.seq_len)
    elif arguments.weights_of:
        command = trace_command(shlex.quote(str(arguments.weights_of)))
        runs = {"weights": measure("weights", 0, command)}
    else:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
            runs = run_all(
                Path(scratch),
                seq_len=arguments.seq_len,
                backend=arguments.backend,
                only=DIAGNOSIS if arguments.diagnosis else None,
            )
    layer = layer_bytes(PRESETS[preset].spec(), torch.bfloat16)
    if arguments.golden_of:
        limit = min(limit, int(LAYERS_LIMIT * layer))
    figures = [
        figure
        for name, watched in runs.items()
        for figure in figures_of(name, watched, layer=layer, limit_bytes=limit)
    ]
    return print_figures("true_size", figures, as_json=arguments.json)


def capture_alone(scratch: Path, preset: str, *, seq_len: str) -> dict[str, Watched]:
    """Write two layers of a preset in BF16, and capture the golden of the last one with its floor."""
    model, golden = (shlex.quote(str(scratch / name)) for name in ("model", "golden"))
    sizes = f"--preset {preset} --num-hidden-layers 2 --dtype bfloat16"
    capture = f"mm2-gpu single-layer --layer 1 --model {model} --stream on --no-prefetch"
    return {
        "synthesize": measure("synthesize", 0, f"mm2-split synthesize {sizes} --output {model}"),
        "golden": measure("golden", 0, f"{capture} --seq-len {seq_len} --output-dir {golden}"),
    }


def run_all(
    scratch: Path, *, seq_len: str, backend: str, only: Collection[str] | None = None
) -> dict[str, Watched]:
    """Run the commands of the path in order; return the time and memory that each took, by name."""
    names = ("model", "golden", "clean", "faulty", "output_alone")
    model, golden, clean, faulty, output_alone = (shlex.quote(str(scratch / name)) for name in names)
    swapped = shlex.quote(f"{SWAPPED}:SwappedDeviceLayer")
    single_layer = f"single-layer --layer 0 --model {model}"
    device = f"mm2-test {single_layer} --golden {golden} --backend {backend}"
    compare = f"mm2-compare --golden {golden} --run"
    commands = {
        "synthesize": f"mm2-split synthesize --preset m2 --num-hidden-layers 1 --output {model}",
        "weights": trace_command(model),
        "golden": f"mm2-gpu {single_layer} --seq-len {seq_len} --output-dir {golden}",
        "device": f"{device} --output-dir {clean}",
        "compare": f"{compare} {clean}",
        "device_swapped": f"{device} --target {swapped} --output-dir {faulty}",
        "compare_swapped": f"{compare} {faulty}",
        "device_output_swapped": f"{device} --sites layer --target {swapped} --output-dir {output_alone}",
        "diagnose_swapped": f"mm2-diagnose --model {model} --golden {golden} --run {output_alone}",
    }
    # A port with swapped weights must be judged wrong, with exit code 1.
    runs = {
        name: measure(name, 1 if name.endswith("_swapped") else 0, command, output=scratch / f"{name}.txt")
        for name, command in commands.items()
        if only is None or name in only
    }
    if MISTAKE not in (scratch / "diagnose_swapped.txt").read_text(encoding="utf-8"):
        sys.exit(f"the diagnosis does not name {MISTAKE}")
    return runs


def trace_command(model: str) -> str:
    """Return the command that traces the weights of layer 0 into mm2's device layer."""
    return f"mm2-test weights --full-size --memory-budget {WEIGHTS_BUDGET} --model {model}"


def measure(name: str, expected_code: int, command: str, *, output: Path = Path(os.devnull)) -> Watched:
    """Run a command and sample its memory; end the benchmark if its exit code is not the expected one.

    What it prints goes to `output`.
    """
    words = shlex.split(command)
    beside = Path(sys.executable).parent / words[0]
    watched = watch([str(beside) if beside.exists() else words[0], *words[1:]], output=output)
    print(f"{name}: {watched}", file=sys.stderr)
    if watched.exit_code != expected_code:
        sys.exit(f"{name} ended with {watched.exit_code}, expected {expected_code}: {command}")
    return watched


def figures_of(name: str, watched: Watched, *, layer: int, limit_bytes: int) -> list[Figure]:
    """Return a command's time, and its peaks of memory in layers of so many bytes."""
    cpu = f"{name}_cpu_s"
    limit = limit_bytes / layer
    anonymous = watched.peak_anonymous_bytes / layer
    resident = watched.peak_resident_bytes / layer
    return [
        Figure.plain(f"{name}_wall_s", watched.wall_s),
        Figure.at_most(cpu, watched.cpu_s, CPU_LIMITS_S[name])
        if name in CPU_LIMITS_S
        else Figure.plain(cpu, watched.cpu_s),
        Figure.at_most(f"{name}_peak_anonymous_over_layer", anonymous, limit),
        Figure.plain(f"{name}_peak_resident_over_layer", resident),
    ]


if __name__ == "__main__":
    sys.exit(main())
