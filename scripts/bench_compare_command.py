"""Time and memory of the whole command `mm2-compare`, cold and warm, in units of reading its two captures once.

A golden of layers of true width, with the full noise floor, is judged against mm2's own layer on the CPU: three layers
with all sites (`--scale full`), or 62 layers at the components' outputs (`component`, which takes 30 GB). The
golden of `component` is made without variants, of which the command reads only statistics. In each round all ways run
one after the other; a figure is the median over the rounds.

- `cold_over_reading`: the command over a plain read of all files of both captures, none of them in the page cache
- `warm_over_reading`: the same with all of them in the page cache
- `share_of_memory_bandwidth`: the rate at which the command compares warm files, over the rate of a copy of 1 GiB
- `warm_cpu_s`: processor time of the command, warm
- `peak_gb`: its anonymous memory

The time that Python takes to import torch is left out of the command's.

    python scripts/bench_compare_command.py --scratch /mnt/disk
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from bench_compare import time_copy
from cpu_golden import WIDE, write_model
from figures import Figure, benchmark_parser, print_figures
from page_cache import drop_cache, warm_cache
from peaks import Watched, watch, watch_package

from minimax_tools.synthetic.toy_model import SyntheticModel

_WIDE = replace(WIDE, num_hidden_layers=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A size of the captures."""

    model: SyntheticModel
    lengths: str  # of the token rows
    sites: str = "all"
    num_variants: int = 2  # of the golden's floor
    num_rounds: int = 5


SCALES = {
    "full": Scale(model=_WIDE, lengths="2048"),
    # Values inside attention are not captured: few heads do.
    "component": Scale(
        model=replace(WIDE, num_hidden_layers=62, num_attention_heads=4, num_key_value_heads=2),
        lengths="4096",
        sites="component",
        # With two, making the golden takes three times as long.
        num_variants=0,
        num_rounds=1,
    ),
    "toy": Scale(model=SyntheticModel(num_hidden_layers=2), lengths="48,33", num_rounds=1),
}
MOST_COLD_OVER_READING, LEAST_SHARE_OF_BANDWIDTH, MOST_PEAK_GB = 1.3, 0.3, 2.0


def main() -> int:
    """Measure and print."""
    parser = benchmark_parser(__doc__, scratch="room for the captures")
    parser.add_argument(
        "--scale", choices=list(SCALES), default="full", help="size of the captures (default: %(default)s)"
    )
    arguments = parser.parse_args()
    scale = SCALES[arguments.scale]
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        golden, run = make_captures(Path(folder), scale)
        figures = list(measure(golden, run, scale.num_rounds))
        return print_figures("compare_command", figures, as_json=arguments.json)


def make_captures(folder: Path, scale: Scale) -> tuple[Path, Path]:
    """Make a golden with its full floor, and a run of mm2's own layer over its inputs; the model is removed."""
    checkpoint, golden, run = folder / "model", folder / "golden", folder / "run"
    write_model(checkpoint, scale.model, dtype=torch.bfloat16)
    of_model = ("--model", str(checkpoint), "--sites", scale.sites, "--quiet")
    of_golden = ("--seq-len", scale.lengths, "--floor-variants", str(scale.num_variants))
    watch_package("gpu_reference", "extract-all", *of_model, *of_golden, "--output-dir", str(golden))
    against = ("--golden", str(golden), "--backend", "cpu", "--output-dir", str(run))
    watch_package("neuron", "sweep", *of_model, *against)
    return golden, run


def measure(golden: Path, run: Path, num_rounds: int) -> Iterator[Figure]:
    """Yield the figures of the command on two captures."""
    files = tuple(path for folder in (golden, run) for path in sorted(folder.iterdir()) if path.is_file())
    num_bytes = sum(path.stat().st_size for path in files)
    # Loops are compiled, and libraries read from the disk, before anything is measured.
    compare(golden, run)
    rounds = [measure_round(golden, run, files) for _ in range(num_rounds)]

    def of(name: str) -> float:
        return median(figures[name] for figures in rounds)

    yield Figure.at_most("cold_over_reading", of("cold_over_reading"), MOST_COLD_OVER_READING)
    yield Figure.plain("warm_over_reading", of("warm_over_reading"))
    # The copy moves 2 GiB: it reads one and writes one.
    share = num_bytes / 2**31 * of("copy_over_warm")
    yield Figure.at_least("share_of_memory_bandwidth", share, LEAST_SHARE_OF_BANDWIDTH)
    seconds = ("cold_s", "cold_reading_s", "warm_s", "warm_reading_s", "import_s")
    for name in (*seconds, "cold_cpu_s", "warm_cpu_s", "import_cpu_s"):
        yield Figure.plain(name, of(name))
    yield Figure.at_most("peak_gb", of("peak_gb"), MOST_PEAK_GB)
    yield Figure.plain("gb_compared", num_bytes / 1e9)


def measure_round(golden: Path, run: Path, files: tuple[Path, ...]) -> dict[str, float]:
    """Measure each way once."""
    imported = watch([sys.executable, "-c", "import torch"])
    drop_cache(files)
    cold_reading_s = time_reading(files)
    drop_cache(files)
    cold = compare(golden, run)
    warm_cache(files)
    warm_reading_s = time_reading(files)
    warm = compare(golden, run)
    cold_s, warm_s = (watched.wall_s - imported.wall_s for watched in (cold, warm))
    return {
        "cold_over_reading": cold_s / cold_reading_s,
        "warm_over_reading": warm_s / warm_reading_s,
        "copy_over_warm": time_copy() / warm_s,
        "cold_s": cold.wall_s,
        "cold_reading_s": cold_reading_s,
        "warm_s": warm.wall_s,
        "warm_reading_s": warm_reading_s,
        "import_s": imported.wall_s,
        "import_cpu_s": imported.cpu_s,
        "cold_cpu_s": cold.cpu_s,
        "warm_cpu_s": warm.cpu_s,
        "peak_gb": max(cold.peak_anonymous_bytes, warm.peak_anonymous_bytes) / 1e9,
    }


def compare(golden: Path, run: Path) -> Watched:
    """Run the command, whose verdict must be a pass."""
    return watch_package("compare", "--golden", str(golden), "--run", str(run), "--json", "--quiet")


def time_reading(files: tuple[Path, ...]) -> float:
    """Measure the seconds that it takes to read files, one after the other."""
    began = time.perf_counter()
    warm_cache(files)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
