"""Head layout: the heads of queries, keys and values that each of several ranks holds.

For N query heads, K kv heads and T ranks. A group is the N/K query heads that read one kv head.

| | kv heads | query heads |
|---|---|---|
| T divides K | each on one rank | with their kv head |
| K divides T | each on T/K ranks | each group divided over the ranks of its kv head, padded on each |
| otherwise | a copy for every query head | divided over all ranks, padded on the last ones |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
