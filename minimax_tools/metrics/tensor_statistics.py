"""Statistics of one tensor, in float64.

The tensor is read in blocks, so no float64 copy exceeds one block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# A block of this size stays in the processor's cache as float64.
_BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """Statistics of a tensor. Those from `mean` to `l2` are over finite elements; None if no element is finite."""

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    l2: float | None
    num_nan: int
    num_inf: int


def measure_tensor(tensor: torch.Tensor) -> TensorStatistics:
    """Return the statistics of a CPU tensor of any shape and dtype."""
    num_nan = num_inf = 0
    sums = _FiniteSums()
    for block in tensor.reshape(-1).split(_BLOCK_ELEMENTS):
        values = block.to(torch.float64)
        finite = values.isfinite()
        if not bool(finite.all()):
            num_nan += int(values.isnan().sum())
            num_inf += int(values.isinf().sum())
            values = values[finite]
        sums.add(values)
    if sums.count == 0:
        return TensorStatistics(
            mean=None, std=None, min=None, max=None, l2=None, num_nan=num_nan, num_inf=num_inf
        )
    return TensorStatistics(
        mean=sums.mean,
        std=math.sqrt(sums.spread / sums.count),
        min=sums.low,
        max=sums.high,
        l2=math.sqrt(sums.squares),
        num_nan=num_nan,
        num_inf=num_inf,
    )


class _FiniteSums:
    """Running sums over finite values.

    Deviations are taken from the first block's mean: plain squares would lose a small spread around a large mean to
    rounding.
    """

    def __init__(self) -> None:
        self.count = 0
        self.squares = self.centre = self.deviation_sum = self.deviation_squares = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, values: torch.Tensor) -> None:
        """Add finite float64 values [n]."""
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
        """Mean of the values; there must be at least one."""
        return self.centre + self.deviation_sum / self.count

    @property
    def spread(self) -> float:
        """Σ(x − mean)²; exactly 0 where all values are the same, or there are none."""
        if self.low >= self.high:
            return 0.0
        return max(self.deviation_squares - self.deviation_sum**2 / self.count, 0.0)
