"""Heads divided among ranks: all there, each with its own kv head, copies counted once."""

from __future__ import annotations

import pytest

from neuron.builtin.rank_cut import HeadLayout

SHAPES = [(6, 1), (6, 2), (6, 3), (6, 6), (4, 2), (8, 8), (48, 8), (10, 5), (1, 1)]
RANKS = [1, 2, 3, 4, 8]


def layouts() -> list[HeadLayout]:
    return [
        HeadLayout(num_heads=heads, num_kv_heads=kv_heads, num_ranks=ranks)
        for heads, kv_heads in SHAPES
        for ranks in RANKS
    ]


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_every_query_head_is_on_one_rank_and_every_rank_holds_as_many(layout: HeadLayout) -> None:
    found = layout.all_query_heads()
    assert sorted(head for head in found if head is not None) == list(range(layout.num_heads))
    assert {len(layout.query_heads(rank)) for rank in range(layout.num_ranks)} == {
        len(found) // layout.num_ranks
    }


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_every_query_head_reads_its_own_kv_head(layout: HeadLayout) -> None:
    group_size = layout.num_heads // layout.num_kv_heads
    for rank in range(layout.num_ranks):
        queries, keys = layout.query_heads(rank), layout.kv_heads(rank)
        assert len(queries) % len(keys) == 0
        for index, head in enumerate(queries):
            if head is not None:
                assert keys[index // (len(queries) // len(keys))] == head // group_size


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_every_kv_head_is_counted_once(layout: HeadLayout) -> None:
    counted = [
        head
        for rank in range(layout.num_ranks)
        for head, counts in zip(layout.kv_heads(rank), layout.is_first_copy(rank), strict=True)
        if counts
    ]
    assert sorted(head for head in counted if head is not None) == list(range(layout.num_kv_heads))
    assert None not in counted


@pytest.mark.parametrize(
    ("kv_heads", "queries", "keys"),
    [
        (1, [(0, 1), (2, 3), (4, 5), (None, None)], [(0,), (0,), (0,), (0,)]),
        (2, [(0, 1), (2, None), (3, 4), (5, None)], [(0,), (0,), (1,), (1,)]),
        (3, [(0, 1), (2, 3), (4, 5), (None, None)], [(0, 0), (1, 1), (2, 2), (None, None)]),
        (6, [(0, 1), (2, 3), (4, 5), (None, None)], [(0, 1), (2, 3), (4, 5), (None, None)]),
    ],
)
def test_six_heads_on_four_ranks(
    kv_heads: int, queries: list[tuple[int | None, ...]], keys: list[tuple[int | None, ...]]
) -> None:
    layout = HeadLayout(num_heads=6, num_kv_heads=kv_heads, num_ranks=4)
    assert [layout.query_heads(rank) for rank in range(4)] == queries
    assert [layout.kv_heads(rank) for rank in range(4)] == keys


def test_groups_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match="6 heads in 4 groups on 2 ranks: expected"):
        HeadLayout(num_heads=6, num_kv_heads=4, num_ranks=2)
