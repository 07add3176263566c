"""Rank cut: a rank's part of a tensor along one dim, read without the rest; and the heads that each rank holds.

The part is made of runs of indices. Indices that no run fills are padding, and zero. For N query heads, K kv heads and
T ranks, a group being the N/K query heads that read one kv head:

| | kv heads | query heads |
|---|---|---|
| T divides K | each on one rank | with their kv head |
| K divides T | each on T/K ranks | each group divided over the ranks of its kv head, padded on each |
| otherwise | a copy for every query head | divided over all ranks, padded on the last ones |
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

# Number of a head. None stands for padding: a head of zeros, which adds nothing.
Head = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """Heads of an attention, divided among ranks.

    All ranks hold equally many. On a rank, its query head j reads its kv head j // (its query heads / its kv heads).
    """

    num_heads: int
    num_kv_heads: int
    num_ranks: int

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.num_ranks) < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} heads in {self.num_kv_heads} groups on {self.num_ranks} ranks: "
                "expected positive numbers, and groups of equal size"
            )

    def query_heads(self, rank: int) -> tuple[Head, ...]:
        """Return the query heads of a rank, in its order."""
        if self._ranks_per_kv_head > 1:
            # Several ranks hold the same kv head: they divide its query heads.
            kv_head, part = divmod(rank, self._ranks_per_kv_head)
            group = range(kv_head * self._group_size, (kv_head + 1) * self._group_size)
            return _padded_part(group, part, self._ranks_per_kv_head)
        # If T divides K, no part cuts through a group: query heads stay with their kv head.
        return _padded_part(range(self.num_heads), rank, self.num_ranks)

    def kv_heads(self, rank: int) -> tuple[Head, ...]:
        """Return the heads of keys and values of a rank, in its order."""
        if self.num_kv_heads % self.num_ranks == 0:
            return _padded_part(range(self.num_kv_heads), rank, self.num_ranks)
        if self._ranks_per_kv_head:
            return (rank // self._ranks_per_kv_head,)
        # A copy for every query head.
        return tuple(None if head is None else head // self._group_size for head in self.query_heads(rank))

    def is_first_copy(self, rank: int) -> tuple[bool, ...]:
        """Decide for each kv head of a rank whether a sum over all ranks counts it: only its first copy, no padding."""
        earlier = {head for earlier_rank in range(rank) for head in self.kv_heads(earlier_rank)}
        decisions = []
        for head in self.kv_heads(rank):
            decisions.append(head is not None and head not in earlier)
            earlier.add(head)
        return tuple(decisions)

    def all_query_heads(self) -> tuple[Head, ...]:
        """Return the query heads of all ranks, in rank order."""
        return tuple(head for rank in range(self.num_ranks) for head in self.query_heads(rank))

    def all_kv_heads(self) -> tuple[Head, ...]:
        """Return the kv heads of all ranks, in rank order."""
        return tuple(head for rank in range(self.num_ranks) for head in self.kv_heads(rank))

    @property
    def _ranks_per_kv_head(self) -> int:
        """Number of ranks that hold each kv head, if K divides T; else 0."""
        return 0 if self.num_ranks % self.num_kv_heads else self.num_ranks // self.num_kv_heads

    @property
    def _group_size(self) -> int:
        return self.num_heads // self.num_kv_heads


def _padded_part(heads: range, part: int, num_parts: int) -> tuple[Head, ...]:
    """Return one of `num_parts` parts of equal length, padded if the heads run out."""
    length = math.ceil(len(heads) / num_parts)
    held = heads[part * length : (part + 1) * length]
    padding = [None] * (length - len(held))
    return (*held, *padding)


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

    @classmethod
    def of_lead(cls, size: int, *, rank: int) -> RankCut:
        """Build a vector's part, which is the whole on rank 0, and padding on others: an addend of a sum over ranks."""
        return cls(dim=0, size=size, runs=() if rank else (IndexRun(0, 0, size),))

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the part's shape for a tensor of `shape`."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def read(self, tensors: LayerTensors, name: str, out: torch.Tensor) -> None:
        """Fill `out` with the part. Of rows only their bytes are read; for columns the whole matrix, band by band."""
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
        else:
            self._read_columns(tensors, name, out)

    def _read_columns(self, tensors: LayerTensors, name: str, out: torch.Tensor) -> None:
        num_rows, _ = tensors.given_shape(name)
        for start in range(0, num_rows, _BAND_ROWS):
            rows = range(start, min(start + _BAND_ROWS, num_rows))
            for run in self.runs:
                part = out[rows.start : rows.stop, run.place : run.place + run.length]
                columns = range(run.source, run.source + run.length)
                tensors.read_into(name, part, rows=rows, columns=columns)

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
