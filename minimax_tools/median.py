"""MedianSearch: the median of many distances in one pass, in little memory.

A sample tells where the median should lie; only distances near there are told apart. n distances of a block
"""

from __future__ import annotations

import numpy as np
import torch

from minimax_tools.pair_sums import Values

# A distance as float32 bits, sign and low bits dropped.
_DROPPED_BITS = 14
MEDIAN_RELATIVE_RESOLUTION = 2.0 ** (_DROPPED_BITS - 23)
_INFINITY_BIN = 0x7F800000 >> _DROPPED_BITS
# Below this a sample says too little.
_FEWEST_SAMPLED = 1 << 12
# Half of a rank's standard deviation in a sample of one; five of them are next to never exceeded.
_MARGIN = 5 * 0.5


class MedianSearch:
    """Counts distances in bins of `MEDIAN_RELATIVE_RESOLUTION` around where their median is expected.

    Args:
        first_bin, last_bin: The bins between which the median should lie; anywhere by default.
    """

    def __init__(self, first_bin: int = 0, last_bin: int = _INFINITY_BIN) -> None:
        self._first_bin, self._last_bin = first_bin, last_bin
        self._low, self._high = _edge(first_bin), _edge(last_bin + 1)
        self._num_below = self._num_seen = 0
        # One bin more than asked for: casting to float32 may round up to the edge.
        self._counts = np.zeros(last_bin - first_bin + 2, dtype=np.int64)

    @classmethod
    def expecting(cls, sample: torch.Tensor) -> MedianSearch:
        """A search near the median of a sample, float64 [n]; what is not finite in it counts nothing."""
        ordered = sample[sample.isfinite()].sort().values
        if ordered.numel() < _FEWEST_SAMPLED:
            return cls()
        margin = _MARGIN / ordered.numel() ** 0.5
        low, high = (
            float(ordered[round(share * (ordered.numel() - 1))]) for share in (0.5 - margin, 0.5 + margin)
        )
        return cls(_bin(low), _bin(high))

    def anew(self) -> MedianSearch:
        """A search in the same place that has seen nothing."""
        return MedianSearch(self._first_bin, self._last_bin)

    def add(self, distances: Values) -> None:
        """Count the distances of one block, float64 [n], all finite."""
        self._num_seen += distances.size
        above = distances >= self._low
        self._num_below += distances.size - int(np.count_nonzero(above))
        # Several times as fast as indexing by a mask.
        near = np.compress(np.logical_and(above, distances < self._high, out=above), distances)
        bins = near.astype(np.float32).view(np.int32) >> _DROPPED_BITS
        self._counts += np.bincount(bins - self._first_bin, minlength=self._counts.size)

    def merge(self, other: MedianSearch) -> None:
        """Add what another search in the same place has counted."""
        self._num_seen += other._num_seen
        self._num_below += other._num_below
        self._counts += other._counts

    @property
    def median(self) -> float | None:
        """The lower median to `MEDIAN_RELATIVE_RESOLUTION`, 0 of nothing; None if it is not where it was expected."""
        if self._num_seen == 0:
            return 0.0
        rank = (self._num_seen - 1) // 2 - self._num_below
        if not 0 <= rank < int(self._counts.sum()):
            return None
        return _edge(self._first_bin + int(np.searchsorted(self._counts.cumsum(), rank, side="right")))


def _bin(distance: float) -> int:
    return int(np.float32(distance).view(np.int32) >> _DROPPED_BITS)


def _edge(position: int) -> float:
    """The lowest distance of a bin; nothing finite lies beyond that of infinity."""
    if position > _INFINITY_BIN:
        return float("inf")
    return float(np.int32(position << _DROPPED_BITS).view(np.float32))
