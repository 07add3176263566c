"""Metrics: what one tensor, or a pair of tensors, measures; in float64, in bounded memory.

Every function walks its arguments in blocks, so the float64 copies never exceed one block. Non-finite
values are counted before anything else and left out of every other number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_BLOCK_ELEMENTS = 1 << 17  # in float64 a block stays in the cache
# |difference| as float32 bits, sign and low bits dropped: 2^-9 relative resolution in 2^17 counters.
_MEDIAN_DROPPED_BITS = 14
MEDIAN_RELATIVE_RESOLUTION = 2.0 ** (_MEDIAN_DROPPED_BITS - 23)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """What a tensor looks like; mean to l2 are over its finite elements and None where there are none."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    l2: float | None
    num_nan: int
    num_inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMetrics:
    """How a target differs from its reference; relative figures refer to the reference.

    `median_abs_diff` is exact to `MEDIAN_RELATIVE_RESOLUTION`; of an even number it is the lower middle one.
    `worst_index` is the position of `max_abs_diff` in the reference's shape. `close_fraction` is of all
    elements: one that is not finite is not close. Cosine is None where a side is zero, Pearson where a side
    is constant.
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
    """The statistics of a CPU tensor of any shape and dtype."""
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
    sums = _PairSums(rtol=rtol, atol=atol)
    for offset, reference_block, target_block in _blocks(reference, target):
        sums.add(offset, reference_block, target_block)
    return sums.result(tuple(reference.shape))


class _Side:
    """Running sums of one side's finite values.

    Deviations are taken from the first block's mean: sums of plain squares would lose a small spread
    around a large mean to rounding.
    """

    def __init__(self) -> None:
        self.count = 0
        self.squares = self.centre = self.deviation_sum = self.deviation_squares = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """Account for float64 values [n] and return their deviations from the centre, [n]."""
        if values.numel() == 0:
            return values
        if self.count == 0:
            self.centre = float(values.mean())
        deviations = values - self.centre
        low, high = values.aminmax()
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        self.count += values.numel()
        self.squares += float(values.dot(values))
        self.deviation_sum += float(deviations.sum())
        self.deviation_squares += float(deviations.dot(deviations))
        return deviations

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


class _PairSums:
    """Running sums over the blocks of a pair."""

    def __init__(self, *, rtol: float, atol: float) -> None:
        self.rtol, self.atol = rtol, atol
        self.num_elements = self.num_close = 0
        self.nonfinite_reference = self.nonfinite_target = 0
        self.reference, self.target = _Side(), _Side()
        self.abs_diff_sum = self.diff_squares = self.products = self.deviation_products = 0.0
        self.worst, self.worst_offset = -1.0, 0
        self.histogram = torch.zeros(1 << (31 - _MEDIAN_DROPPED_BITS), dtype=torch.int64)

    def add(self, offset: int, reference: torch.Tensor, target: torch.Tensor) -> None:
        """Account for one block of both sides, float64, [n]; `offset` is its first flat index."""
        finite = reference.isfinite() & target.isfinite()
        self.num_elements += reference.numel()
        distance = (target - reference).abs_()
        if bool(finite.all()):
            self._note_worst(offset, distance)
        else:
            self.nonfinite_reference += int((~reference.isfinite()).sum())
            self.nonfinite_target += int((~target.isfinite()).sum())
            self._note_worst(offset, torch.where(finite, distance, -1.0))
            reference, target, distance = reference[finite], target[finite], distance[finite]
        self._add_distance(reference, distance)
        self._add_products(reference, target)

    def _note_worst(self, offset: int, distance: torch.Tensor) -> None:
        index = int(distance.argmax())
        if float(distance[index]) > self.worst:
            self.worst, self.worst_offset = float(distance[index]), offset + index

    def _add_distance(self, reference: torch.Tensor, distance: torch.Tensor) -> None:
        self.num_close += int((distance <= self.atol + self.rtol * reference.abs()).sum())
        self.abs_diff_sum += float(distance.sum())
        self.diff_squares += float(distance.dot(distance))
        bits = distance.to(torch.float32).view(torch.int32) >> _MEDIAN_DROPPED_BITS
        self.histogram += torch.bincount(bits.to(torch.int64), minlength=self.histogram.numel())

    def _add_products(self, reference: torch.Tensor, target: torch.Tensor) -> None:
        self.products += float(reference.dot(target))
        self.deviation_products += float(self.reference.add(reference).dot(self.target.add(target)))

    def result(self, shape: tuple[int, ...]) -> PairMetrics:
        """The metrics of all blocks seen."""
        count = max(self.reference.count, 1)
        reference_norm, target_norm = math.sqrt(self.reference.squares), math.sqrt(self.target.squares)
        drift = self.reference.deviation_sum * self.target.deviation_sum / count
        return PairMetrics(
            num_elements=self.num_elements,
            num_nonfinite_reference=self.nonfinite_reference,
            num_nonfinite_target=self.nonfinite_target,
            max_abs_diff=max(self.worst, 0.0),
            mean_abs_diff=self.abs_diff_sum / count,
            median_abs_diff=self._median(),
            close_fraction=self.num_close / self.num_elements,
            cosine_similarity=_correlation(self.products, self.reference.squares, self.target.squares),
            pearson_correlation=_correlation(
                self.deviation_products - drift,
                self.reference.spread,
                self.target.spread,
            ),
            relative_l2=_ratio(math.sqrt(self.diff_squares), reference_norm, of_zeros=0.0),
            norm_ratio=_ratio(target_norm, reference_norm, of_zeros=1.0),
            worst_index=_unravel(self.worst_offset, shape),
        )

    def _median(self) -> float:
        total = int(self.histogram.sum())
        if total == 0:
            return 0.0
        position = int((self.histogram.cumsum(0) > (total - 1) // 2).to(torch.int8).argmax())
        bits = torch.tensor(position << _MEDIAN_DROPPED_BITS, dtype=torch.int32)
        return float(bits.view(torch.float32))


def _blocks(
    reference: torch.Tensor, target: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    reference_flat, target_flat = reference.reshape(-1), target.reshape(-1)
    for offset in range(0, reference_flat.numel(), _BLOCK_ELEMENTS):
        window = slice(offset, offset + _BLOCK_ELEMENTS)
        yield offset, reference_flat[window].to(torch.float64), target_flat[window].to(torch.float64)


def _correlation(products: float, reference_squares: float, target_squares: float) -> float | None:
    if reference_squares <= 0.0 or target_squares <= 0.0:
        return None
    # Two roots: the product of two small sums would underflow.
    return max(-1.0, min(1.0, products / (math.sqrt(reference_squares) * math.sqrt(target_squares))))


def _ratio(numerator: float, denominator: float, *, of_zeros: float) -> float:
    if denominator > 0.0:
        return numerator / denominator
    return of_zeros if numerator == 0.0 else math.inf


def _unravel(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        index.append(offset % size)
        offset //= size
    return tuple(reversed(index))
