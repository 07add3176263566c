"""HeadLayout: which heads of queries, keys and values a rank holds, where they divide among the ranks and where not.

| N heads, K kv heads, T ranks | kv heads | query heads |
|---|---|---|
| T divides K | each on one rank | with their kv head |
| K divides T | each on T/K ranks | a group is divided over the ranks of its kv head, and padded on each |
| else | a copy for every query head | divided over all ranks, padded on the last ones |
"""

from __future__ import annotations

from dataclasses import dataclass

# A logical head by its number, or padding: a head of zeros, which adds nothing.
Head = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """The heads of an attention, divided among ranks.

    On every rank as many: local query head j reads local kv head j // (query heads / kv heads) there.

    Args:
        num_heads: N.
        num_kv_heads: K.
        num_ranks: T.
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
        """The query heads of a rank, in its order."""
        if self.num_kv_heads % self.num_ranks == 0:
            return _part(range(self.num_heads), rank, self.num_ranks)
        if self._ranks_per_kv_head:
            group = self._group(rank // self._ranks_per_kv_head)
            return _part(group, rank % self._ranks_per_kv_head, self._ranks_per_kv_head)
        return _part(range(self.num_heads), rank, self.num_ranks)

    def kv_heads(self, rank: int) -> tuple[Head, ...]:
        """The heads of keys and values of a rank, in its order."""
        if self.num_kv_heads % self.num_ranks == 0:
            return _part(range(self.num_kv_heads), rank, self.num_ranks)
        if self._ranks_per_kv_head:
            return (rank // self._ranks_per_kv_head,)
        return tuple(None if head is None else head // self._group_size for head in self.query_heads(rank))

    def is_counted(self, rank: int) -> tuple[bool, ...]:
        """For each kv head of a rank, whether it is the first copy of its head on any rank, and no padding."""
        seen = {head for before in range(rank) for head in self.kv_heads(before)}
        counted = []
        for head in self.kv_heads(rank):
            counted.append(head is not None and head not in seen)
            seen.add(head)
        return tuple(counted)

    def all_query_heads(self) -> tuple[Head, ...]:
        """The query heads of all ranks, in rank order."""
        return tuple(head for rank in range(self.num_ranks) for head in self.query_heads(rank))

    def all_kv_heads(self) -> tuple[Head, ...]:
        """The kv heads of all ranks, in rank order."""
        return tuple(head for rank in range(self.num_ranks) for head in self.kv_heads(rank))

    @property
    def _ranks_per_kv_head(self) -> int:
        """How many ranks hold each kv head; 0 where they do not divide among the heads."""
        return 0 if self.num_ranks % self.num_kv_heads else self.num_ranks // self.num_kv_heads

    @property
    def _group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    def _group(self, kv_head: int) -> range:
        """The query heads that read a kv head."""
        return range(kv_head * self._group_size, (kv_head + 1) * self._group_size)


def _part(heads: range, part: int, num_parts: int) -> tuple[Head, ...]:
    """One of `num_parts` parts of equal length, padded where the heads do not suffice."""
    length = -(-len(heads) // num_parts)
    own = heads[part * length : (part + 1) * length]
    return (*own, *(None,) * (length - len(own)))
