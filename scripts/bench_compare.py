"""Time and memory of comparing two captures.

The seeds are the comparison scripts that came before mm2. A ratio `a_over_b` is the time of a over the time of b.

- `seed_over_ours`: the seeds' `compute_difference_metrics` (torch) over mm2's figures of a pair. Both read all sites of
  the same two captures from memory, and leave medians out.
- `seed_over_ours_with_medians`: the same with medians, two in the seeds and one in mm2
- `polygraphy_over_ours_with_medians`: Polygraphy's simple comparison over mm2's, if Polygraphy is installed
- `share_of_memory_bandwidth`: rate at which mm2 reads the pair, over the rate of a copy of 1 GiB
- `peak_of_16_layers_over_2`: anonymous memory of the whole command, which must not grow with a capture

In each round all ways run one after the other. A ratio is the median over the rounds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_golden import IMPLEMENTATIONS, capture_cpu_golden, write_model
from figures import Figure, benchmark_parser, print_figures
from peaks import watch

from minimax_tools.capture.reader import Capture
from minimax_tools.metrics.pair_metrics import PairSums, compare_tensors, sample_centres, sum_pair
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest

Pair = tuple[torch.Tensor, torch.Tensor]

RTOL, ATOL = 1e-2, 1e-3
# Model, lengths of the token rows, number of rounds.
SCALES = {
    "full": (SyntheticModel(num_hidden_layers=2, hidden_size=2048, num_local_experts=16), (1024, 1024), 7),
    "toy": (SyntheticModel(num_hidden_layers=1), (48, 33), 1),
}


def main() -> int:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--scale", choices=list(SCALES), default="full", help="size of the captures (default: %(default)s)"
    )
    arguments = parser.parse_args()
    figures = [*measure_speed(arguments.scale), *measure_memory(arguments.scale)]
    return print_figures("compare", figures, as_json=arguments.json)


def measure_speed(scale: str) -> Iterator[Figure]:
    """Yield the ratios to other comparisons, over all sites of two goldens of different implementations."""
    model, lengths, num_rounds = SCALES[scale]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model"), model, dtype=torch.bfloat16)
        captures = [
            capture_cpu_golden(
                Path(folder, "model"),
                Path(folder, name),
                rows=InputRequest(seq_lens=lengths),
                noise_floor="off",
                attention=name,
                experts=experts,
            )
            for name, experts in IMPLEMENTATIONS
        ]
        pairs = list(read_pairs(*captures))
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
        "ours": sums_without_median,
        "seed": seed_figures,
        "ours_with_medians": partial(compare_tensors, rtol=RTOL, atol=ATOL),
        "seed_with_medians": lambda *pair: (seed_figures(*pair), seed_medians(*pair)),
    }
    polygraphy = find_polygraphy()
    if polygraphy is not None:
        ways["polygraphy"] = polygraphy
    rounds = [
        {"copy": time_copy()} | {name: time_way(way, pairs) for name, way in ways.items()}
        for _ in range(num_rounds)
    ]

    def ratio(name: str, other: str) -> float:
        return median(times[name] / times[other] for times in rounds)

    num_bytes = sum(tensor.nbytes for pair in pairs for tensor in pair)
    yield Figure.at_least("seed_over_ours", ratio("seed", "ours"), 12)
    yield Figure.plain("seed_over_ours_with_medians", ratio("seed_with_medians", "ours_with_medians"))
    if polygraphy is not None:
        yield Figure.plain("polygraphy_over_ours_with_medians", ratio("polygraphy", "ours_with_medians"))
    # The copy moves 2 GiB: it reads one and writes one.
    yield Figure.plain("share_of_memory_bandwidth", num_bytes / 2**31 * ratio("copy", "ours"))
    yield Figure.plain("mb_compared", num_bytes / 1e6)


def measure_memory(scale: str) -> Iterator[Figure]:
    """Yield the peak of the whole command on a capture of 16 layers, over its peak on one of 2."""
    lengths = SCALES[scale][1]
    with tempfile.TemporaryDirectory() as folder:
        peaks = {}
        for num_layers in (2, 16):
            model, golden = Path(folder, f"model-{num_layers}"), Path(folder, f"golden-{num_layers}")
            small = SyntheticModel(num_hidden_layers=num_layers, hidden_size=512)
            write_model(model, small, dtype=torch.bfloat16)
            capture_cpu_golden(model, golden, rows=InputRequest(seq_lens=lengths), noise_floor="full")
            words = ["--golden", str(golden), "--run", str(golden), "--quiet"]
            watched = watch([sys.executable, "-m", "compare", *words])
            assert watched.exit_code == 0, f"a golden differs from itself: exit code {watched.exit_code}"
            peaks[num_layers] = watched.peak_anonymous_bytes
    yield Figure.at_most("peak_of_16_layers_over_2", peaks[16] / peaks[2], 1.1)


def read_pairs(reference: Capture, target: Capture) -> Iterator[Pair]:
    """Yield both values of each floating-point site of two captures."""
    for layer in reference.layers:
        for site in reference.sites(layer):
            pair = reference.read(layer, site).contiguous(), target.read(layer, site).contiguous()
            if pair[0].is_floating_point():
                yield pair


def sums_without_median(reference: torch.Tensor, target: torch.Tensor) -> object:
    """Compute the sums behind mm2's figures of a pair, without the median."""
    reference, target = reference.reshape(-1), target.reshape(-1)
    centres = sample_centres(reference, target)
    return sum_pair(reference, target, begin=lambda: PairSums(centres, rtol=RTOL, atol=ATOL))


def seed_figures(reference: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """Compute the figures of the seeds' script, in float32 over whole tensors, without its two medians."""
    reference, target = reference.float(), target.float()
    distance = (reference - target).abs()
    relative = distance / (reference.abs() + 1e-8)
    figures: dict[str, Any] = {
        "distance": (float(distance.max()), float(distance.mean()), float(distance.std())),
        "relative": (float(relative.max()), float(relative.mean())),
    }
    for name, side in (("reference", reference), ("target", target)):
        figures[name] = (float(side.mean()), float(side.std()), float(side.min()), float(side.max()))
        figures[f"{name} is finite"] = not (bool(side.isnan().any()) or bool(side.isinf().any()))
    figures["all close"] = torch.allclose(reference, target, rtol=RTOL, atol=ATOL)
    figures["close"] = float(torch.isclose(reference, target, rtol=RTOL, atol=ATOL).float().mean())
    flat, other = reference.flatten(), target.flatten()
    figures["cosine"] = float(torch.nn.functional.cosine_similarity(flat[None], other[None]))
    flat, other = flat - flat.mean(), other - other.mean()
    figures["pearson"] = float((flat * other).sum() / (flat.norm() * other.norm() + 1e-8))
    return figures


def seed_medians(reference: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """Compute the medians of the seeds' script, of absolute and of relative differences."""
    reference = reference.float()
    distance = (reference - target.float()).abs()
    return float(distance.median()), float((distance / (reference.abs() + 1e-8)).median())


def find_polygraphy() -> Callable[[torch.Tensor, torch.Tensor], object] | None:
    """Return Polygraphy's simple comparison of two outputs; None if Polygraphy is not installed."""
    try:
        from polygraphy.comparator import IterationResult, SimpleCompareFunc
        from polygraphy.logger import G_LOGGER
    except ImportError:
        print("Polygraphy is not installed: pip install polygraphy", file=sys.stderr)
        return None
    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    compare = SimpleCompareFunc(rtol=RTOL, atol=ATOL)

    def run(reference: torch.Tensor, target: torch.Tensor) -> object:
        sides = [IterationResult({"site": side.float().numpy()}) for side in (reference, target)]
        return compare(*sides)

    return run


def time_way(way: Callable[[torch.Tensor, torch.Tensor], object], pairs: list[Pair]) -> float:
    """Measure the seconds that a way of comparing takes for all pairs."""
    began = time.perf_counter()
    for reference, target in pairs:
        way(reference, target)
    return time.perf_counter() - began


def time_copy() -> float:
    """Measure the seconds that a copy of 1 GiB takes."""
    source = torch.ones(2**28)
    sink = torch.empty_like(source).copy_(source)
    began = time.perf_counter()
    sink.copy_(source)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
