"""Metrics of a pair of tensors, in float64.

Tensors are read in blocks, so no copy exceeds one block. Values that are not finite are counted, and left out
of every other metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from minimax_tools.metrics.error_sums import read_blocks, sum_on_cores
from minimax_tools.metrics.pair_sums import Centres, DistanceCounts, PairSums, Tolerance, Values

# Elements of the sample from which the centres are taken.
_SAMPLE_ELEMENTS = 1 << 11


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMetrics:
    """Differences of a target from its reference. Relative metrics refer to the reference."""

    num_elements: int
    num_nonfinite_reference: int  # NaN and Inf in the reference
    num_nonfinite_target: int
    max_abs_diff: float  # largest |target − reference|
    mean_abs_diff: float
    median_abs_diff: float  # lower median, exact to `MEDIAN_RELATIVE_RESOLUTION`
    close_fraction: float  # fraction of elements within the tolerance; NaN and Inf are not close
    cosine_similarity: float | None  # cosine of the angle between the sides; None if a side is zero
    pearson_correlation: float | None  # None if a side is constant
    relative_l2: float  # ‖target − reference‖ / ‖reference‖
    norm_ratio: float  # ‖target‖ / ‖reference‖
    worst_index: tuple[int, ...]  # index of the element with `max_abs_diff`


def compare_tensors(
    reference: torch.Tensor, target: torch.Tensor, *, rtol: float, atol: float
) -> PairMetrics:
    """Compare two CPU tensors of one shape. An element is close if |target − reference| <= atol + rtol·|reference|.

    Raises:
        ValueError: The shapes differ, or a tensor is empty.
    """
    if reference.shape != target.shape or reference.numel() == 0:
        raise ValueError(f"cannot compare shapes {tuple(reference.shape)} and {tuple(target.shape)}")
    shape, reference, target = tuple(reference.shape), reference.reshape(-1), target.reshape(-1)
    centres, tolerance = sample_centres(reference, target), Tolerance(rtol=rtol, atol=atol)
    accumulated = sum_pair(reference, target, begin=lambda: _SumsAndCounts(tolerance, centres))
    return _pair_metrics(accumulated.sums, accumulated.counts.median, shape)


def sample_centres(reference: torch.Tensor, target: torch.Tensor) -> Centres:
    """Return the centres of two flat tensors, which `PairSums` subtracts before squaring, from a sample of each."""
    # Odd, so that the sample does not hold one channel again and again. `| 1` makes an even step odd.
    step = max(reference.numel() // _SAMPLE_ELEMENTS, 1) | 1
    return Centres.of(reference[::step].double(), target[::step].double())


S = TypeVar("S", bound="Summing")


class Summing(Protocol):
    """Sums over a pair of tensors that is given block by block."""

    def add(self, offset: int, reference: Values, target: Values) -> None:
        """Add one block of both sides, [n]; `offset` is the flat index of its first element."""

    def merge(self: S, other: S) -> None:
        """Add sums over other blocks of the same pair."""


def sum_pair(reference: torch.Tensor, target: torch.Tensor, *, begin: Callable[[], S]) -> S:
    """Sum over two flat tensors, one part of them on each core; `begin` makes the empty sums of a part."""

    def sum_part(elements: range) -> S:
        sums = begin()
        for window, (reference_block, target_block) in read_blocks((reference, target), elements):
            sums.add(window.start, reference_block, target_block)
        return sums

    total, *others = sum_on_cores(sum_part, reference)
    for sums in others:
        total.merge(sums)
    return total


class _SumsAndCounts:
    """Sums and counts behind every metric of a pair."""

    def __init__(self, tolerance: Tolerance, centres: Centres) -> None:
        self.sums = PairSums(tolerance, centres)
        self.counts = DistanceCounts()

    def add(self, offset: int, reference: Values, target: Values) -> None:
        self.sums.add(offset, reference, target)
        self.counts.add(reference, target)

    def merge(self, other: _SumsAndCounts) -> None:
        self.sums.merge(other.sums)
        self.counts.merge(other.counts)


def _pair_metrics(sums: PairSums, median: float, shape: tuple[int, ...]) -> PairMetrics:
    totals = sums.totals
    reference, target = sums.reference, sums.target
    reference_norm = math.sqrt(reference.squares_around_zero)
    return PairMetrics(
        num_elements=sums.num_elements,
        num_nonfinite_reference=totals.nonfinite_reference,
        num_nonfinite_target=totals.nonfinite_target,
        # -1 if no element is finite on both sides.
        max_abs_diff=max(sums.worst, 0.0),
        mean_abs_diff=totals.distances / max(totals.num_finite, 1),
        median_abs_diff=median,
        close_fraction=totals.num_close / sums.num_elements,
        cosine_similarity=_correlation(
            sums.products, reference.squares_around_zero, target.squares_around_zero
        ),
        pearson_correlation=_correlation(
            sums.covariation, reference.squares_around_mean, target.squares_around_mean
        ),
        relative_l2=_ratio(math.sqrt(totals.distance_squares), reference_norm, of_zeros=0.0),
        norm_ratio=_ratio(math.sqrt(target.squares_around_zero), reference_norm, of_zeros=1.0),
        worst_index=tuple(map(int, np.unravel_index(sums.worst_offset, shape))),
    )


def _correlation(products: float, reference_squares: float, target_squares: float) -> float | None:
    """Return Σrt / √(Σr² · Σt²) from the three sums; None if a side has no square."""
    if reference_squares <= 0.0 or target_squares <= 0.0:
        return None
    # Two roots, because the product of two small sums would underflow.
    return max(-1.0, min(1.0, products / (math.sqrt(reference_squares) * math.sqrt(target_squares))))


def _ratio(numerator: float, denominator: float, *, of_zeros: float) -> float:
    """Divide; return `of_zeros` for 0 / 0, and infinity for another number over 0."""
    if denominator > 0.0:
        return numerator / denominator
    return of_zeros if numerator == 0.0 else math.inf
