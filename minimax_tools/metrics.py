"""Metrics: what one tensor, or a pair of tensors, measures; in float64, in bounded memory.

Every function walks its arguments in blocks, so the float64 copies never exceed one block. Non-finite
values are counted before anything else and left out of every other number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_BLOCK_ELEMENTS = 1 << 20
# |difference| as float32 bits, without its low bits: 2^-9 relative resolution in 2^18 counters.
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

    `median_abs_diff` is exact to `MEDIAN_RELATIVE_RESOLUTION`. `worst_index` is the position of
    `max_abs_diff` in the reference's shape. Cosine and Pearson are None where a side is zero or constant.
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
    flat = tensor.reshape(-1)
    num_nan = num_inf = count = 0
    total = squares = 0.0
    low, high = math.inf, -math.inf
    for block in flat.split(_BLOCK_ELEMENTS):
        values = block.to(torch.float64)
        num_nan += int(values.isnan().sum())
        num_inf += int(values.isinf().sum())
        values = values[values.isfinite()]
        if values.numel():
            count += values.numel()
            total += float(values.sum())
            squares += float(values.square().sum())
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    if count == 0:
        return TensorStatistics(mean=None, std=None, min=None, max=None, l2=None, num_nan=num_nan, num_inf=num_inf)
    mean = total / count
    return TensorStatistics(
        mean=mean,
        std=math.sqrt(max(squares / count - mean * mean, 0.0)),
        min=low,
        max=high,
        l2=math.sqrt(squares),
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


class _PairSums:
    """Running sums over the blocks of a pair."""

    def __init__(self, *, rtol: float, atol: float) -> None:
        self.rtol, self.atol = rtol, atol
        self.num_elements = self.num_finite = self.num_close = 0
        self.nonfinite_reference = self.nonfinite_target = 0
        self.abs_diff_sum = self.diff_squares = 0.0
        self.worst, self.worst_offset = -1.0, 0
        self.reference_sum = self.target_sum = 0.0
        self.reference_squares = self.target_squares = self.products = 0.0
        self.histogram = torch.zeros(1 << (31 - _MEDIAN_DROPPED_BITS), dtype=torch.int64)

    def add(self, offset: int, reference: torch.Tensor, target: torch.Tensor) -> None:
        """Account for one block of both sides, float64, [n]; `offset` is its first flat index."""
        finite = reference.isfinite() & target.isfinite()
        self.num_elements += reference.numel()
        if not bool(finite.all()):
            self.nonfinite_reference += int((~reference.isfinite()).sum())
            self.nonfinite_target += int((~target.isfinite()).sum())
            reference = torch.where(finite, reference, 0.0)
            target = torch.where(finite, target, 0.0)
        distance = (target - reference).abs()
        self.num_finite += int(finite.sum())
        self.num_close += int(((distance <= self.atol + self.rtol * reference.abs()) & finite).sum())
        self.abs_diff_sum += float(distance.sum())
        self.diff_squares += float(distance.dot(distance))
        self._note_worst(offset, torch.where(finite, distance, -1.0))
        self.reference_sum += float(reference.sum())
        self.target_sum += float(target.sum())
        self.reference_squares += float(reference.dot(reference))
        self.target_squares += float(target.dot(target))
        self.products += float(reference.dot(target))
        bits = distance[finite].to(torch.float32).view(torch.int32) >> _MEDIAN_DROPPED_BITS
        self.histogram += torch.bincount(bits.to(torch.int64), minlength=self.histogram.numel())

    def _note_worst(self, offset: int, distance: torch.Tensor) -> None:
        index = int(distance.argmax())
        if float(distance[index]) > self.worst:
            self.worst, self.worst_offset = float(distance[index]), offset + index

    def result(self, shape: tuple[int, ...]) -> PairMetrics:
        """The metrics of all blocks seen."""
        count = max(self.num_finite, 1)
        reference_norm, target_norm = math.sqrt(self.reference_squares), math.sqrt(self.target_squares)
        reference_mean, target_mean = self.reference_sum / count, self.target_sum / count
        return PairMetrics(
            num_elements=self.num_elements,
            num_nonfinite_reference=self.nonfinite_reference,
            num_nonfinite_target=self.nonfinite_target,
            max_abs_diff=max(self.worst, 0.0),
            mean_abs_diff=self.abs_diff_sum / count,
            median_abs_diff=self._median(),
            close_fraction=self.num_close / self.num_elements,
            cosine_similarity=_correlation(self.products, self.reference_squares, self.target_squares),
            pearson_correlation=_correlation(
                self.products - count * reference_mean * target_mean,
                self.reference_squares - count * reference_mean**2,
                self.target_squares - count * target_mean**2,
            ),
            relative_l2=_ratio(math.sqrt(self.diff_squares), reference_norm),
            norm_ratio=_ratio(target_norm, reference_norm),
            worst_index=_unravel(self.worst_offset, shape),
        )

    def _median(self) -> float:
        total = int(self.histogram.sum())
        if total == 0:
            return 0.0
        position = int((self.histogram.cumsum(0) > (total - 1) // 2).to(torch.int8).argmax())
        bits = torch.tensor(position << _MEDIAN_DROPPED_BITS, dtype=torch.int32)
        return float(bits.view(torch.float32))


def _blocks(reference: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    reference_flat, target_flat = reference.reshape(-1), target.reshape(-1)
    for offset in range(0, reference_flat.numel(), _BLOCK_ELEMENTS):
        window = slice(offset, offset + _BLOCK_ELEMENTS)
        yield offset, reference_flat[window].to(torch.float64), target_flat[window].to(torch.float64)


def _correlation(products: float, reference_squares: float, target_squares: float) -> float | None:
    if reference_squares <= 0.0 or target_squares <= 0.0:
        return None
    return max(-1.0, min(1.0, products / math.sqrt(reference_squares * target_squares)))


def _ratio(numerator: float, denominator: float) -> float:
    if denominator > 0.0:
        return numerator / denominator
    return 1.0 if numerator == 0.0 else math.inf


def _unravel(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        index.append(offset % size)
        offset //= size
    return tuple(reversed(index))
