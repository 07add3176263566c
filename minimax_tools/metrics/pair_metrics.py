"""Metrics: figures of one tensor and of a pair of tensors, in float64.

Tensors are read in blocks, so a float64 copy never exceeds one block. Values that are not finite are counted and left
out of every other figure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from minimax_tools.machine.compiled import compiled
from minimax_tools.machine.core_pool import CorePool
from minimax_tools.metrics.pair_sums import Centres, PairSums, Tolerance, Values

_BLOCK_ELEMENTS = 1 << 17  # in float64 a block stays in the cache
_PAIR_BLOCK_ELEMENTS = 1 << 16  # as above, with two sides; of fewer the calls take longer than the loop
# Threads cost more than they save on fewer.
_FEWEST_BLOCKS = 4
_SAMPLE_ELEMENTS = 1 << 11


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """Statistics of a tensor; mean to l2 are over its finite elements, None where there are none."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    l2: float | None
    num_nan: int
    num_inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMetrics:
    """Differences of a target from its reference; relative figures refer to the reference.

    `median_abs_diff` is the lower median, exact to `MEDIAN_RELATIVE_RESOLUTION`. `worst_index` is the position of
    `max_abs_diff` in the reference's shape. `close_fraction` counts elements that are not finite as not close.
    Cosine is None where a side is zero, Pearson where a side is constant.
    """

    num_elements: int
    num_nonfinite_reference: int
    num_nonfinite_target: int
    max_abs_diff: float
    mean_abs_diff: float
    median_abs_diff: float
    close_fraction: float
    cosine_similarity: float | None
    pearson_correlation: float | None
    relative_l2: float
    norm_ratio: float
    worst_index: tuple[int, ...]


def measure_tensor(tensor: torch.Tensor) -> TensorStatistics:
    """Measure a CPU tensor of any shape and dtype."""
    num_nan = num_inf = 0
    side = _Side()
    for block in tensor.reshape(-1).split(_BLOCK_ELEMENTS):
        values = block.to(torch.float64)
        finite = values.isfinite()
        if not bool(finite.all()):
            num_nan += int(values.isnan().sum())
            num_inf += int(values.isinf().sum())
            values = values[finite]
        side.add(values)
    if side.count == 0:
        return TensorStatistics(
            mean=None, std=None, min=None, max=None, l2=None, num_nan=num_nan, num_inf=num_inf
        )
    return TensorStatistics(
        mean=side.mean,
        std=math.sqrt(side.spread / side.count),
        min=side.low,
        max=side.high,
        l2=math.sqrt(side.squares),
        num_nan=num_nan,
        num_inf=num_inf,
    )


def compare_tensors(
    reference: torch.Tensor, target: torch.Tensor, *, rtol: float, atol: float
) -> PairMetrics:
    """Compare two CPU tensors of one shape; an element is close where |t - r| <= atol + rtol·|r|.

    Raises:
        ValueError: The shapes differ, or a tensor is empty.
    """
    if reference.shape != target.shape or reference.numel() == 0:
        raise ValueError(f"cannot compare shapes {tuple(reference.shape)} and {tuple(target.shape)}")
    mine, theirs = reference.reshape(-1), target.reshape(-1)
    centres, tolerance = sample_centres(mine, theirs), Tolerance(rtol=rtol, atol=atol)
    figures = sum_pair(mine, theirs, begin=lambda: _Figures(tolerance, centres))
    return _pair_metrics(figures.sums, figures.counts.median, tuple(reference.shape))


def sample_centres(reference: torch.Tensor, target: torch.Tensor) -> Centres:
    """Return the centres of two flat tensors, from a sample of each."""
    # An odd step does not meet the same channel again and again.
    step = max(reference.numel() // _SAMPLE_ELEMENTS, 1) | 1
    return Centres.of(reference[::step].double(), target[::step].double())


S = TypeVar("S", bound="Summing")


class Summing(Protocol):
    """Sums that take a pair block by block."""

    def add(self, offset: int, reference: Values, target: Values) -> None:
        """Add one block of both sides, float64 [n]; `offset` is its first flat index."""

    def merge(self: S, other: S) -> None:
        """Add the blocks of another."""


def sum_pair(reference: torch.Tensor, target: torch.Tensor, *, begin: Callable[[], S]) -> S:
    """Add two flat tensors to the sums that `begin` makes, a part of them on each core."""

    def add(part: range) -> S:
        sums = begin()
        buffers = torch.empty(2, min(_PAIR_BLOCK_ELEMENTS, reference.numel()), dtype=torch.float64)
        for offset in part:
            window = slice(offset, min(offset + _PAIR_BLOCK_ELEMENTS, reference.numel()))
            mine, theirs = buffers[:, : window.stop - offset]
            sums.add(offset, mine.copy_(reference[window]).numpy(), theirs.copy_(target[window]).numpy())
        return sums

    offsets = range(0, reference.numel(), _PAIR_BLOCK_ELEMENTS)
    num_parts = torch.get_num_threads() if len(offsets) >= _FEWEST_BLOCKS else 1
    share = -(-len(offsets) // num_parts)
    parts = [offsets[start : start + share] for start in range(0, len(offsets), share)]
    with CorePool("metrics") if num_parts > 1 else contextlib.nullcontext() as pool:
        total, *others = map(add, parts) if pool is None else pool.map(add, parts)
    for sums in others:
        total.merge(sums)
    return total


class _Figures:
    """Sums and counts behind every metric of a pair."""

    def __init__(self, tolerance: Tolerance, centres: Centres) -> None:
        self.sums = PairSums(tolerance, centres)
        self.counts = DistanceCounts()

    def add(self, offset: int, reference: Values, target: Values) -> None:
        self.sums.add(offset, reference, target)
        self.counts.add(reference, target)

    def merge(self, other: _Figures) -> None:
        self.sums.merge(other.sums)
        self.counts.merge(other.counts)


def _pair_metrics(sums: PairSums, median: float, shape: tuple[int, ...]) -> PairMetrics:
    totals = sums.totals
    reference_squares, target_squares = sums.squares
    reference_norm = math.sqrt(reference_squares)
    return PairMetrics(
        num_elements=sums.num_elements,
        num_nonfinite_reference=totals.nonfinite_reference,
        num_nonfinite_target=totals.nonfinite_target,
        max_abs_diff=max(sums.worst, 0.0),
        mean_abs_diff=totals.distances / max(totals.num_finite, 1),
        median_abs_diff=median,
        close_fraction=totals.num_close / sums.num_elements,
        cosine_similarity=_correlation(sums.products, reference_squares, target_squares),
        pearson_correlation=_correlation(sums.covariation, *sums.spreads),
        relative_l2=_ratio(math.sqrt(totals.distance_squares), reference_norm, of_zeros=0.0),
        norm_ratio=_ratio(math.sqrt(target_squares), reference_norm, of_zeros=1.0),
        worst_index=tuple(map(int, np.unravel_index(sums.worst_offset, shape))),
    )


class _Side:
    """Running sums of one side's finite values.

    Deviations are taken from the first block's mean: sums of plain squares would lose a small spread
    around a large mean to rounding.
    """

    def __init__(self) -> None:
        self.count = 0
        self.squares = self.centre = self.deviation_sum = self.deviation_squares = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, values: torch.Tensor) -> None:
        """Add float64 values [n]."""
        if values.numel() == 0:
            return
        if self.count == 0:
            self.centre = float(values.mean())
        deviations = values - self.centre
        low, high = values.aminmax()
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        self.count += values.numel()
        self.squares += float(values.dot(values))
        self.deviation_sum += float(deviations.sum())
        self.deviation_squares += float(deviations.dot(deviations))

    @property
    def mean(self) -> float:
        """Mean of all values; there must be one."""
        return self.centre + self.deviation_sum / self.count

    @property
    def spread(self) -> float:
        """Σ(x − mean)²; exactly 0 where all values are the same, or there are none."""
        if self.low >= self.high:
            return 0.0
        return max(self.deviation_squares - self.deviation_sum**2 / self.count, 0.0)


def _correlation(products: float, reference_squares: float, target_squares: float) -> float | None:
    if reference_squares <= 0.0 or target_squares <= 0.0:
        return None
    # Two roots: the product of two small sums would underflow.
    return max(-1.0, min(1.0, products / (math.sqrt(reference_squares) * math.sqrt(target_squares))))


def _ratio(numerator: float, denominator: float, *, of_zeros: float) -> float:
    if denominator > 0.0:
        return numerator / denominator
    return of_zeros if numerator == 0.0 else math.inf


# A distance as float32 bits, sign and low bits dropped, is the number of its bin.
_DROPPED_BITS = 14
MEDIAN_RELATIVE_RESOLUTION = 2.0 ** (_DROPPED_BITS - 23)
_INFINITY_BIN = 0x7F800000 >> _DROPPED_BITS

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


class DistanceCounts:
    """Counts of distances in bins, each `MEDIAN_RELATIVE_RESOLUTION` wide."""

    def __init__(self) -> None:
        self._counts: Counts = np.zeros(_INFINITY_BIN + 1, dtype=np.int64)
        self._num_counted = 0

    def add(self, reference: Values, target: Values) -> None:
        """Count |target − reference| of one block, [n] each, where both are finite."""
        self._num_counted += _count(reference, target, self._counts)

    def merge(self, other: DistanceCounts) -> None:
        """Add the counts of another."""
        self._counts += other._counts
        self._num_counted += other._num_counted

    @property
    def median(self) -> float:
        """Lower median, exact to `MEDIAN_RELATIVE_RESOLUTION`; 0 without distances."""
        if self._num_counted == 0:
            return 0.0
        middle = _find(self._counts, (self._num_counted - 1) // 2)
        return float(np.int32(middle << _DROPPED_BITS).view(np.float32))


@compiled("(float64[::1], float64[::1], int64[::1])")
def _count(reference: Values, target: Values, counts: Counts) -> int:
    """Count the distances of a block into `counts`, and return their number."""
    num_counted = 0
    for i in range(reference.size):
        r, t = reference[i], target[i]
        if np.isfinite(r) and np.isfinite(t):
            num_counted += 1
            counts[np.float32(abs(t - r)).view(np.int32) >> _DROPPED_BITS] += 1
    return num_counted


@compiled("(int64[::1], int64)")
def _find(counts: Counts, rank: int) -> int:
    """Return the bin of the distance of a rank, counted from 0; there must be more than `rank` distances."""
    position = 0
    while rank >= counts[position]:
        rank -= counts[position]
        position += 1
    return position
