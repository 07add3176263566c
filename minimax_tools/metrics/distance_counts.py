"""DistanceCounts: the median distance of a pair of tensors, from counts in bins."""

from __future__ import annotations

import numpy as np

from minimax_tools.machine.compiled import compiled
from minimax_tools.metrics.pair_sums import Values

# A bin's number is the float32 bits of its distances without the 14 low ones. Bits of larger distances are larger.
_DROPPED_BITS = 14
# Width of a bin as a fraction of the distance: float32 has 23 bits after the leading one.
MEDIAN_RELATIVE_RESOLUTION = 2.0 ** (_DROPPED_BITS - 23)
# Bin of Inf, the last: a finite float64 distance may exceed float32.
_INFINITY_BIN = 0x7F800000 >> _DROPPED_BITS

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


class DistanceCounts:
    """Counts of distances |target − reference| in bins, from which their median follows without sorting."""

    def __init__(self) -> None:
        self._counts: Counts = np.zeros(_INFINITY_BIN + 1, dtype=np.int64)
        self._num_counted = 0

    def add(self, reference: Values, target: Values) -> None:
        """Count |target − reference| of one block, [n] each, where both are finite."""
        self._num_counted += _count_block(reference, target, self._counts)

    def merge(self, other: DistanceCounts) -> None:
        """Add the counts of other blocks."""
        self._counts += other._counts
        self._num_counted += other._num_counted

    @property
    def median(self) -> float:
        """Lower median, with a relative error below `MEDIAN_RELATIVE_RESOLUTION`; 0 without distances."""
        if self._num_counted == 0:
            return 0.0
        middle_bin = _find_bin(self._counts, (self._num_counted - 1) // 2)
        return float(np.int32(middle_bin << _DROPPED_BITS).view(np.float32))


@compiled(
    "(float32[::1], float32[::1], int64[::1])",
    "(float64[::1], float64[::1], int64[::1])",
)
def _count_block(reference: Values, target: Values, counts: Counts) -> int:
    """Count the distances of a block into `counts`, and return their number."""
    num_counted = 0
    for i in range(reference.size):
        r, t = np.float64(reference[i]), np.float64(target[i])
        if np.isfinite(r) and np.isfinite(t):
            num_counted += 1
            # Unsigned: an index that may be negative costs a comparison.
            counts[np.float32(abs(t - r)).view(np.uint32) >> np.uint32(_DROPPED_BITS)] += 1
    return num_counted


@compiled("(int64[::1], int64)")
def _find_bin(counts: Counts, rank: int) -> int:
    """Return the bin of the distance with `rank` smaller ones; there must be more than `rank` distances."""
    index = 0
    while rank >= counts[index]:
        rank -= counts[index]
        index += 1
    return index
