"""Time and memory of comparing two captures.

The seeds are the comparison scripts that came before mm2. A ratio `a_over_b` is the time of a over the time of b.

- `seed_over_ours`: the seeds' `compute_difference_metrics` (torch) over mm2's figures of a pair. Both read all sites of
  the same two captures from memory, and leave medians out.
- `share_of_memory_bandwidth`: rate at which mm2 reads the pair, over the rate of a copy of 1 GiB
- `peak_of_16_layers_over_2`: anonymous memory of the whole command, which must not grow with a capture

In each round all ways run one after the other. A ratio is the median over the rounds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_golden import IMPLEMENTATIONS, capture_cpu_golden, write_model
from figures import Figure, benchmark_parser, print_figures
from peaks import watch_package

from minimax_tools.capture.reader import Capture
from minimax_tools.metrics.pair_metrics import PairSums, sample_centres, sum_pair
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
    arguments = benchmark_parser(__doc__, scale=True).parse_args()
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
    rounds = [
        {
            "copy": time_copy(),
            "ours": time_way(sums_without_median, pairs),
            "seed": time_way(seed_figures, pairs),
        }
        for _ in range(num_rounds)
    ]

    def ratio(name: str, other: str) -> float:
        return median(times[name] / times[other] for times in rounds)

    num_bytes = sum(tensor.nbytes for pair in pairs for tensor in pair)
    yield Figure.at_least("seed_over_ours", ratio("seed", "ours"), 12)
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
            compared = watch_package("compare", "--golden", str(golden), "--run", str(golden), "--quiet")
            peaks[num_layers] = compared.peak_anonymous_bytes
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
