"""Rank cut: a rank's part of a tensor along one dim, read without the rest.

The part is made of runs of indices. Indices that no run fills are padding, and zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from minimax_tools.checkpoint.filling import Gathered, unchanged
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import copy_matrix
from neuron.builtin.head_layout import Head

# Rows read at once for a part made of columns: two FP8 blocks of 128, and few enough to stay in a processor's cache.
_BAND_ROWS = 256


class IndexRun(NamedTuple):
    """A run of indices: `length` of them from `source` on in the tensor, from `place` on in the rank's part."""

    source: int
    place: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCut:
    """A rank's part of a tensor: `size` indices along `dim`, 0 for rows and 1 for columns, filled by `runs`."""

    dim: int
    size: int
    runs: tuple[IndexRun, ...]

    @classmethod
    def of_heads(cls, heads: Sequence[Head], *, head_dim: int, dim: int) -> RankCut:
        """Build the part that holds some heads, each of `head_dim` indices; None stands for a head of padding."""
        runs: list[IndexRun] = []
        for place, head in enumerate(heads):
            if head is None:
                continue
            run = IndexRun(head * head_dim, place * head_dim, head_dim)
            last = runs[-1] if runs else None
            # A head that follows the last run, in the tensor and in the part, lengthens it: both are read at once.
            if last and (last.source + last.length, last.place + last.length) == (run.source, run.place):
                runs[-1] = last._replace(length=last.length + head_dim)
            else:
                runs.append(run)
        return cls(dim=dim, size=len(heads) * head_dim, runs=tuple(runs))

    @classmethod
    def of_part(cls, size: int, *, part: int, num_parts: int, dim: int) -> RankCut:
        """Build one of `num_parts` parts of equal size; the last ones are padded where `size` does not divide."""
        length = part_size(size, num_parts)
        start = min(part * length, size)
        filled = min(length, size - start)
        return cls(dim=dim, size=length, runs=(IndexRun(start, 0, filled),) if filled else ())

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the part's shape for a tensor of `shape`."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def read(self, tensors: LayerTensors, name: str, out: torch.Tensor) -> None:
        """Fill `out` with the part. Of rows only their bytes are read; for columns the whole matrix, band by band.

        Raises:
            CheckpointError: The tensor cannot be read.
            ValueError: `out` has another shape.
        """
        shape = tensors.given_shape(name)
        if self._is_whole(shape):
            tensors.read_into(name, out)
            return
        if tuple(out.shape) != self.shape_of(shape):
            raise ValueError(f"{name}: out has {list(out.shape)}, expected {list(self.shape_of(shape))}")
        if sum(run.length for run in self.runs) < self.size:
            out.zero_()
        if self.dim == 0:
            for run in self.runs:
                rows = range(run.source, run.source + run.length)
                tensors.read_into(name, out[run.place : run.place + run.length], rows=rows)
        elif self.runs:
            self._read_columns(tensors, name, out)

    def _read_columns(self, tensors: LayerTensors, name: str, out: torch.Tensor) -> None:
        num_rows, _ = tensors.given_shape(name)
        # Only the columns from the first run to the last are kept.
        first = min(run.source for run in self.runs)
        columns = range(first, max(run.source + run.length for run in self.runs))
        band = torch.empty(min(_BAND_ROWS, num_rows), len(columns), dtype=out.dtype)
        for start in range(0, num_rows, _BAND_ROWS):
            rows = range(start, min(start + _BAND_ROWS, num_rows))
            filled_band = band[: len(rows)]
            tensors.read_into(name, filled_band, rows=rows, columns=columns)
            for run in self.runs:
                source = filled_band.narrow(1, run.source - first, run.length)
                copy_matrix(source, out[rows.start : rows.stop, run.place : run.place + run.length])

    def weight(self, tensors: LayerTensors, name: str) -> torch.Tensor | Gathered:
        """Return the part of one of the layer's tensors, read when it is loaded."""
        shape = tensors.given_shape(name)
        if self._is_whole(shape):
            return unchanged(tensors, name)
        return Gathered.whole(name, self.shape_of(shape), partial(self.read, tensors))

    def _is_whole(self, shape: Sequence[int]) -> bool:
        size = shape[self.dim]
        return self.size == size and self.runs == (IndexRun(0, 0, size),)


def part_size(size: int, num_parts: int) -> int:
    """Return the size of a part, padding included."""
    return math.ceil(size / num_parts)
