"""PairSums: running float64 sums over blocks of two tensors, from which every metric of a pair is computed.

r and t are an element of the reference and of the target; n is the number of elements of a block.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from minimax_tools.machine.compiled import compiled

Values = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """An element is close where |target − reference| <= atol + rtol·|reference|."""

    rtol: float
    atol: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Centres:
    """A number for each side that is subtracted before squaring.

    Plain squares would lose a small spread around a large mean to rounding. Where the spread outweighs the mean, the
    centre is 0.
    """

    reference: float
    target: float

    @classmethod
    def of(cls, reference: torch.Tensor, target: torch.Tensor) -> Centres:
        """Choose the centres by samples of the two sides, of any shape."""
        return cls(reference=_centre(reference), target=_centre(target))


class Totals(NamedTuple):
    """Sums over elements; all but the first two count elements that are finite on both sides."""

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


class PairSums:
    """Sums over the blocks of a pair that were added; elements that are not finite are only counted.

    Args:
        tolerance: Tolerance of close elements.
        centres: Centres of both sides.
    """

    def __init__(self, tolerance: Tolerance, centres: Centres) -> None:
        self._tolerance = tolerance
        self._centres = centres
        self.num_elements = 0
        self.totals = Totals()
        self.worst, self.worst_offset = -1.0, 0

    def add(self, offset: int, reference: Values, target: Values) -> None:
        """Add one block of both sides, [n]; `offset` is its first flat index."""
        totals, worst, index = _add_up(
            reference,
            target,
            self._centres.reference,
            self._centres.target,
            self._tolerance.rtol,
            self._tolerance.atol,
            self.worst,
        )
        self._include(reference.size, totals, worst, offset + index)

    def merge(self, other: PairSums) -> None:
        """Add another's sums, of the same tolerance and centres."""
        self._include(other.num_elements, other.totals, other.worst, other.worst_offset)

    def _include(self, num_elements: int, totals: Totals, worst: float, worst_offset: int) -> None:
        self.num_elements += num_elements
        self.totals = Totals(*map(operator.add, self.totals, totals))
        if (worst, -worst_offset) > (self.worst, -self.worst_offset):
            self.worst, self.worst_offset = worst, worst_offset

    @property
    def squares(self) -> tuple[float, float]:
        """Σ r² and Σ t²."""
        count = self.totals.num_finite
        mine, theirs = (
            squares + centre * (2 * deviations + count * centre)
            for squares, deviations, centre in self._sides()
        )
        return mine, theirs

    @property
    def products(self) -> float:
        """Σ r·t."""
        totals, mine, theirs = self.totals, self._centres.reference, self._centres.target
        shifts = mine * totals.target_deviations + theirs * totals.reference_deviations
        return totals.products + shifts + totals.num_finite * mine * theirs

    @property
    def spreads(self) -> tuple[float, float]:
        """Σ(r − mean)² and Σ(t − mean)²; exactly 0 where rounding of the mean explains it."""
        count = max(self.totals.num_finite, 1)
        mine, theirs = (
            squares - deviations**2 / count
            if squares - deviations**2 / count > count * (4 * np.finfo(np.float64).eps * centre) ** 2
            else 0.0
            for squares, deviations, centre in self._sides()
        )
        return float(mine), float(theirs)

    @property
    def covariation(self) -> float:
        """Σ(r − mean)·(t − mean)."""
        totals = self.totals
        drift = totals.reference_deviations * totals.target_deviations / max(totals.num_finite, 1)
        return totals.products - drift

    def _sides(self) -> tuple[tuple[float, float, float], ...]:
        """Squares, deviations and centre of each side."""
        return (
            (self.totals.reference_squares, self.totals.reference_deviations, self._centres.reference),
            (self.totals.target_squares, self.totals.target_deviations, self._centres.target),
        )


def _centre(sample: torch.Tensor) -> float:
    finite = sample[sample.isfinite()]
    if finite.numel() == 0:
        return 0.0
    mean = float(finite.mean())
    return mean if abs(mean) > float(finite.std(correction=0)) else 0.0


# Vectorised by the compiler: a range without branches, where elements that do not count add 0.
@compiled("(float64[::1], float64[::1], float64, float64, float64, float64, float64)", sums_in_any_order=True)
def _add_up(
    reference: Values,
    target: Values,
    reference_centre: float,
    target_centre: float,
    rtol: float,
    atol: float,
    known_worst: float,
) -> tuple[Totals, float, int]:
    """Return a block's `Totals`, its largest distance (-1 if none), and its index if it exceeds `known_worst`."""
    nonfinite_reference = nonfinite_target = num_finite = num_close = 0
    distances = distance_squares = products = 0.0
    reference_deviations = reference_squares = target_deviations = target_squares = 0.0
    # The bits of non-negative floats are ordered as their values, and hold no NaN.
    worst_bits = np.int64(-1)
    for i in range(reference.size):
        r, t = reference[i], target[i]
        is_finite = np.isfinite(r) & np.isfinite(t)
        nonfinite_reference += not np.isfinite(r)
        nonfinite_target += not np.isfinite(t)
        num_finite += is_finite
        num_close += is_finite & (abs(t - r) <= atol + rtol * abs(r))
        distance = np.float64(abs(t - r) if is_finite else 0.0)
        distances += distance
        distance_squares += distance * distance
        worst_bits = max(worst_bits, distance.view(np.int64) if is_finite else np.int64(-1))
        deviation = r - reference_centre if is_finite else 0.0
        other_deviation = t - target_centre if is_finite else 0.0
        reference_deviations += deviation
        reference_squares += deviation * deviation
        target_deviations += other_deviation
        target_squares += other_deviation * other_deviation
        products += deviation * other_deviation
    worst = np.int64(worst_bits).view(np.float64) if worst_bits >= 0 else -1.0
    index = 0
    if worst > known_worst:
        while abs(target[index] - reference[index]) != worst:
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
