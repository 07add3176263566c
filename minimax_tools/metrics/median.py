"""DistanceCounts: many distances counted in narrow bins, from which their median follows, in little memory.

n elements of a block
"""

from __future__ import annotations

import numpy as np

from minimax_tools.machine.compiled import compiled
from minimax_tools.metrics.pair_sums import Values

# A distance as float32 bits, sign and low bits dropped, is the number of its bin.
_DROPPED_BITS = 14
MEDIAN_RELATIVE_RESOLUTION = 2.0 ** (_DROPPED_BITS - 23)
_INFINITY_BIN = 0x7F800000 >> _DROPPED_BITS

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


class DistanceCounts:
    """How many distances lie in each bin; the bins are `MEDIAN_RELATIVE_RESOLUTION` wide."""

    def __init__(self) -> None:
        self._counts: Counts = np.zeros(_INFINITY_BIN + 1, dtype=np.int64)
        self._num_counted = 0

    def add(self, reference: Values, target: Values) -> None:
        """Count |target − reference| of one block, [n] each, where both are finite."""
        self._num_counted += _count(reference, target, self._counts)

    def merge(self, other: DistanceCounts) -> None:
        """Add what another has counted."""
        self._counts += other._counts
        self._num_counted += other._num_counted

    @property
    def median(self) -> float:
        """The lower median to `MEDIAN_RELATIVE_RESOLUTION`, 0 of nothing."""
        if self._num_counted == 0:
            return 0.0
        middle = _find(self._counts, (self._num_counted - 1) // 2)
        return float(np.int32(middle << _DROPPED_BITS).view(np.float32))


@compiled("(float64[::1], float64[::1], int64[::1])")
def _count(reference: Values, target: Values, counts: Counts) -> int:
    """Count the distances of a block; how many they are."""
    num_counted = 0
    for i in range(reference.size):
        r, t = reference[i], target[i]
        if np.isfinite(r) and np.isfinite(t):
            num_counted += 1
            counts[np.float32(abs(t - r)).view(np.int32) >> _DROPPED_BITS] += 1
    return num_counted


@compiled("(int64[::1], int64)")
def _find(counts: Counts, rank: int) -> int:
    """The bin of the distance of a rank, which starts at 0; there must be more than `rank`."""
    position = 0
    while rank >= counts[position]:
        rank -= counts[position]
        position += 1
    return position
