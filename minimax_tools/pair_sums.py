"""PairSums: running sums over blocks of two tensors, in float64, from which every metric of a pair follows.

A block's float64 copies stay in a core's cache: numpy and torch work on the same memory, each where it is faster.
n elements of a block
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK_ELEMENTS = 1 << 15

Values = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """An element is close where |target − reference| <= atol + rtol·|reference|."""

    rtol: float
    atol: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Centres:
    """A number for each side that its deviations are taken from.

    Sums of plain squares would lose a small spread around a large mean to rounding. Where the spread outweighs
    the mean, 0 does and spares the work.
    """

    reference: float
    target: float

    @classmethod
    def of(cls, reference: torch.Tensor, target: torch.Tensor) -> Centres:
        """Those of samples of the two sides, any shape."""
        return cls(reference=_centre(reference), target=_centre(target))


class PairSums:
    """Sums over the blocks of a pair that were added; elements that are not finite are only counted.

    Args:
        tolerance: What is close.
        centres: What deviations are taken from.
    """

    def __init__(self, tolerance: Tolerance, centres: Centres) -> None:
        self._tolerance = tolerance
        self._centres = centres.reference, centres.target
        self._buffers = tuple(np.empty(BLOCK_ELEMENTS) for _ in range(4))
        self._mask = np.empty(BLOCK_ELEMENTS, dtype=np.bool_)
        self.num_elements = self.num_finite = self.num_close = 0
        self.nonfinite_reference = self.nonfinite_target = 0
        self.distance_sum = self.distance_squares = 0.0
        self.deviation_sums = np.zeros(2)
        self.deviation_squares = np.zeros(2)
        self.deviation_products = 0.0
        self.worst, self.worst_offset = -1.0, 0

    def add(self, offset: int, reference: torch.Tensor, target: torch.Tensor) -> Values:
        """Account for one block of both sides, [n] of any dtype; `offset` is its first flat index.

        Returns:
            |target − reference| of the elements that are finite on both sides, until the next call.
        """
        mine, theirs, distance, bound = (buffer[: reference.numel()] for buffer in self._buffers)
        mine_tensor = torch.from_numpy(mine).copy_(reference)
        theirs_tensor = torch.from_numpy(theirs).copy_(target)
        torch.sub(theirs_tensor, mine_tensor, out=torch.from_numpy(distance)).abs_()
        self.num_elements += mine.size
        total = float(torch.from_numpy(distance).sum())
        if not np.isfinite(total):
            mine, theirs, distance = self._without_nonfinite(offset, mine, theirs, distance)
            bound, total = bound[: mine.size], float(distance.sum())
        elif distance.size:
            self._note_worst(offset, distance)
        self.num_finite += mine.size
        self.distance_sum += total
        self.distance_squares += _dot(distance, distance)
        self._count_close(mine, distance, bound)
        self._add_deviations(mine, theirs)
        return distance

    def merge(self, other: PairSums) -> None:
        """Add another's sums, of the same tolerance and centres."""
        for name in ("num_elements", "num_finite", "num_close", "nonfinite_reference", "nonfinite_target"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.distance_sum += other.distance_sum
        self.distance_squares += other.distance_squares
        self.deviation_sums += other.deviation_sums
        self.deviation_squares += other.deviation_squares
        self.deviation_products += other.deviation_products
        if (other.worst, -other.worst_offset) > (self.worst, -self.worst_offset):
            self.worst, self.worst_offset = other.worst, other.worst_offset

    @property
    def squares(self) -> tuple[float, float]:
        """Σ r² and Σ t²."""
        mine, theirs = (
            float(squares + centre * (2 * deviations + self.num_finite * centre))
            for squares, deviations, centre in zip(
                self.deviation_squares, self.deviation_sums, self._centres, strict=True
            )
        )
        return mine, theirs

    @property
    def products(self) -> float:
        """Σ r·t."""
        mine, theirs = self._centres
        my_sum, their_sum = self.deviation_sums
        shifts = mine * their_sum + theirs * my_sum + self.num_finite * mine * theirs
        return float(self.deviation_products + shifts)

    @property
    def spreads(self) -> tuple[float, float]:
        """Σ(r − mean)² and Σ(t − mean)²; exactly 0 where it is no more than rounding of the mean."""
        count = max(self.num_finite, 1)
        mine, theirs = (
            float(squares - deviations**2 / count)
            if squares - deviations**2 / count > count * (4 * np.finfo(np.float64).eps * centre) ** 2
            else 0.0
            for squares, deviations, centre in zip(
                self.deviation_squares, self.deviation_sums, self._centres, strict=True
            )
        )
        return mine, theirs

    @property
    def covariation(self) -> float:
        """Σ(r − mean)·(t − mean)."""
        drift = self.deviation_sums[0] * self.deviation_sums[1] / max(self.num_finite, 1)
        return float(self.deviation_products - drift)

    def _without_nonfinite(
        self, offset: int, mine: Values, theirs: Values, distance: Values
    ) -> tuple[Values, Values, Values]:
        is_mine, is_theirs = np.isfinite(mine), np.isfinite(theirs)
        self.nonfinite_reference += int(np.count_nonzero(~is_mine))
        self.nonfinite_target += int(np.count_nonzero(~is_theirs))
        finite = is_mine & is_theirs
        self._note_worst(offset, np.where(finite, distance, -1.0))
        return mine[finite], theirs[finite], distance[finite]

    def _note_worst(self, offset: int, distance: Values) -> None:
        index = int(distance.argmax())
        if distance[index] > self.worst:
            self.worst, self.worst_offset = float(distance[index]), offset + index

    def _count_close(self, mine: Values, distance: Values, bound: Values) -> None:
        np.abs(mine, out=bound)
        bound *= self._tolerance.rtol
        bound += self._tolerance.atol
        self.num_close += int(
            np.count_nonzero(np.less_equal(distance, bound, out=self._mask[: distance.size]))
        )

    def _add_deviations(self, mine: Values, theirs: Values) -> None:
        for side, (values, centre) in enumerate(zip((mine, theirs), self._centres, strict=True)):
            if centre != 0.0:
                values -= centre
            self.deviation_sums[side] += float(torch.from_numpy(values).sum())
            self.deviation_squares[side] += _dot(values, values)
        self.deviation_products += _dot(mine, theirs)


def _centre(sample: torch.Tensor) -> float:
    finite = sample[sample.isfinite()]
    if finite.numel() == 0:
        return 0.0
    mean = float(finite.mean())
    return mean if abs(mean) > float(finite.std(correction=0)) else 0.0


def _dot(left: Values, right: Values) -> float:
    """numpy's own would start threads of its own beside torch's."""
    return float(torch.from_numpy(left).dot(torch.from_numpy(right)))
