"""Metrics of a pair of tensors, in float64.

Tensors are read in blocks, so no copy exceeds one block. Values that are not finite are counted, and left out
of every other metric.

In formulas, r is an element of the reference and t the element of the target at the same index. A deviation is an
element minus the centre of its side. n is the number of elements of a block.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from minimax_tools.machine.compiled import compiled
from minimax_tools.metrics.error_sums import read_blocks, sum_on_cores

Values = np.ndarray[tuple[int], np.dtype[np.float32]]  # or float64
# A number for each side, reference before target, that is subtracted before squaring: about the side's mean, 0 if the
# spread exceeds it. Without it, squares would lose a small spread around a large mean to rounding.
Centres = tuple[float, float]


class Totals(NamedTuple):
    """Counts and sums over elements. All but the first two are over elements that are finite on both sides.

    A distance is |t − r|, squares are of deviations, and a product is of both sides' deviations.
    """

    nonfinite_reference: int = 0
    nonfinite_target: int = 0
    num_finite: int = 0
    num_close: int = 0
    distances: float = 0.0
    distance_squares: float = 0.0
    reference_deviations: float = 0.0
    reference_squares: float = 0.0
    target_deviations: float = 0.0
    target_squares: float = 0.0
    products: float = 0.0


class SideSums(NamedTuple):
    """Sums over those elements x of one side that are finite on both sides."""

    num_finite: int
    centre: float
    deviations: float  # Σ(x − centre)
    squares: float  # Σ(x − centre)²

    @property
    def squares_around_zero(self) -> float:
        """Σ x²."""
        return self.squares + self.centre * (2 * self.deviations + self.num_finite * self.centre)

    @property
    def squares_around_mean(self) -> float:
        """Σ(x − mean)²; exactly 0 if it is so small that rounding of the mean explains it."""
        count = max(self.num_finite, 1)
        spread = self.squares - self.deviations**2 / count
        rounding = count * (4 * np.finfo(np.float64).eps * self.centre) ** 2
        return float(spread) if spread > rounding else 0.0


class PairSums:
    """Sums over the blocks that were added, from which every metric but the median follows.

    Attributes:
        num_elements: Number of elements of one side.
        totals: Counts and sums.
        worst: Largest |t − r|; -1 before any.
        worst_offset: Flat index of the first element with that distance.
    """

    def __init__(self, centres: Centres, *, rtol: float, atol: float) -> None:
        self._centres = centres
        self._tolerances = rtol, atol
        self.num_elements = 0
        self.totals = Totals()
        self.worst, self.worst_offset = -1.0, 0

    def add(self, offset: int, reference: Values, target: Values) -> None:
        """Add one block of both sides, [n]; `offset` is the flat index of its first element."""
        totals, worst, index = _add_up(reference, target, *self._centres, *self._tolerances, self.worst)
        self._include(reference.size, totals, worst, offset + index)

    def merge(self, other: PairSums) -> None:
        """Add sums over other blocks of the same pair."""
        self._include(other.num_elements, other.totals, other.worst, other.worst_offset)

    def _include(self, num_elements: int, totals: Totals, worst: float, worst_offset: int) -> None:
        self.num_elements += num_elements
        self.totals = Totals(*map(operator.add, self.totals, totals))
        # Of equal distances the first element counts, in whatever order the blocks come.
        if (worst, -worst_offset) > (self.worst, -self.worst_offset):
            self.worst, self.worst_offset = worst, worst_offset

    @property
    def reference(self) -> SideSums:
        """Sums over the reference."""
        sums = self.totals
        return SideSums(sums.num_finite, self._centres[0], sums.reference_deviations, sums.reference_squares)

    @property
    def target(self) -> SideSums:
        """Sums over the target."""
        sums = self.totals
        return SideSums(sums.num_finite, self._centres[1], sums.target_deviations, sums.target_squares)

    @property
    def products(self) -> float:
        """Σ r·t."""
        totals, (r_centre, t_centre) = self.totals, self._centres
        shifts = r_centre * totals.target_deviations + t_centre * totals.reference_deviations
        return totals.products + shifts + totals.num_finite * r_centre * t_centre

    @property
    def covariation(self) -> float:
        """Σ(r − mean)·(t − mean)."""
        totals = self.totals
        drift = totals.reference_deviations * totals.target_deviations / max(totals.num_finite, 1)
        return totals.products - drift


# The loop has no branches, so the compiler vectorises it. Elements that do not count add 0.
@compiled(
    "(float32[::1], float32[::1], float64, float64, float64, float64, float64)",
    "(float64[::1], float64[::1], float64, float64, float64, float64, float64)",
    sums_in_any_order=True,
)
def _add_up(
    reference: Values,
    target: Values,
    reference_centre: float,
    target_centre: float,
    rtol: float,
    atol: float,
    known_worst: float,
) -> tuple[Totals, float, int]:
    """Return a block's `Totals`, its largest distance (-1 if none), and that element's index.

    The index is searched only for a distance above `known_worst`; else it is 0.
    """
    nonfinite_reference = nonfinite_target = num_finite = num_close = 0
    distances = distance_squares = products = 0.0
    reference_deviations = reference_squares = target_deviations = target_squares = 0.0
    # Distances are compared as integers: the bits of non-negative floats are in the order of their values.
    worst_bits = np.int64(-1)
    for i in range(reference.size):
        r, t = np.float64(reference[i]), np.float64(target[i])
        is_finite = np.isfinite(r) & np.isfinite(t)
        nonfinite_reference += not np.isfinite(r)
        nonfinite_target += not np.isfinite(t)
        num_finite += is_finite
        num_close += is_finite & (abs(t - r) <= atol + rtol * abs(r))
        distance = np.float64(abs(t - r) if is_finite else 0.0)
        distances += distance
        distance_squares += distance * distance
        worst_bits = max(worst_bits, distance.view(np.int64) if is_finite else np.int64(-1))
        r_deviation = r - reference_centre if is_finite else 0.0
        t_deviation = t - target_centre if is_finite else 0.0
        reference_deviations += r_deviation
        reference_squares += r_deviation * r_deviation
        target_deviations += t_deviation
        target_squares += t_deviation * t_deviation
        products += r_deviation * t_deviation
    worst = np.int64(worst_bits).view(np.float64) if worst_bits >= 0 else -1.0
    index = 0
    if worst > known_worst:
        while abs(np.float64(target[index]) - np.float64(reference[index])) != worst:
            index += 1
    totals = Totals(
        nonfinite_reference,
        nonfinite_target,
        num_finite,
        num_close,
        distances,
        distance_squares,
        reference_deviations,
        reference_squares,
        target_deviations,
        target_squares,
        products,
    )
    return totals, worst, index


# A bin's number is the float32 bits of its distances without the 14 low ones. Bits of larger distances are larger.
_DROPPED_BITS = 14
# Width of a bin as a fraction of the distance: float32 has 23 bits after the leading one.
MEDIAN_RELATIVE_RESOLUTION = 2.0 ** (_DROPPED_BITS - 23)
# Bin of Inf, the last: a finite float64 distance may exceed float32.
_INFINITY_BIN = 0x7F800000 >> _DROPPED_BITS

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


class CountedPair(PairSums):
    """The same, with counts of the distances in bins, from which their median follows without sorting."""

    def __init__(self, centres: Centres, *, rtol: float, atol: float) -> None:
        super().__init__(centres, rtol=rtol, atol=atol)
        self._counts: Counts = np.zeros(_INFINITY_BIN + 1, dtype=np.int64)

    def add(self, offset: int, reference: Values, target: Values) -> None:
        """Add a block and its counts."""
        super().add(offset, reference, target)
        _count_block(reference, target, self._counts)

    def merge(self, other: PairSums) -> None:
        """Merge sums of the same kind."""
        super().merge(other)
        assert isinstance(other, CountedPair), "sums of one pair are of one kind"
        self._counts += other._counts

    @property
    def median(self) -> float:
        """Lower median, with a relative error below `MEDIAN_RELATIVE_RESOLUTION`; 0 without distances."""
        num_counted = self.totals.num_finite
        if num_counted == 0:
            return 0.0
        middle_bin = _find_bin(self._counts, (num_counted - 1) // 2)
        return float(np.int32(middle_bin << _DROPPED_BITS).view(np.float32))


@compiled(
    "(float32[::1], float32[::1], int64[::1])",
    "(float64[::1], float64[::1], int64[::1])",
)
def _count_block(reference: Values, target: Values, counts: Counts) -> None:
    """Count the distances of a block into `counts`."""
    for i in range(reference.size):
        r, t = np.float64(reference[i]), np.float64(target[i])
        if np.isfinite(r) and np.isfinite(t):
            # Unsigned: an index that may be negative costs a comparison.
            counts[np.float32(abs(t - r)).view(np.uint32) >> np.uint32(_DROPPED_BITS)] += 1


@compiled("(int64[::1], int64)")
def _find_bin(counts: Counts, rank: int) -> int:
    """Return the bin of the distance with `rank` smaller ones; there must be more than `rank` distances."""
    index = 0
    while rank >= counts[index]:
        rank -= counts[index]
        index += 1
    return index


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
    centres = sample_centres(reference, target)
    sums = sum_pair(reference, target, begin=lambda: CountedPair(centres, rtol=rtol, atol=atol))
    return _pair_metrics(sums, shape)


def sample_centres(reference: torch.Tensor, target: torch.Tensor) -> Centres:
    """Return the centres of two flat tensors, from a sample of each."""
    # Odd, so that the sample does not hold one channel again and again. `| 1` makes an even step odd.
    step = max(reference.numel() // _SAMPLE_ELEMENTS, 1) | 1
    return _centre(reference[::step].double()), _centre(target[::step].double())


S = TypeVar("S", bound=PairSums)


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


def _centre(sample: torch.Tensor) -> float:
    finite = sample[sample.isfinite()]
    if finite.numel() == 0:
        return 0.0
    mean = float(finite.mean())
    return mean if abs(mean) > float(finite.std(correction=0)) else 0.0


def _pair_metrics(sums: CountedPair, shape: tuple[int, ...]) -> PairMetrics:
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
        median_abs_diff=sums.median,
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
