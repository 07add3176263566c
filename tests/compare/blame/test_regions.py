"""Regions: their items, words, numbers and chances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch

from compare.blame.regions import (
    Region,
    TokenList,
    channel_regions,
    expert_regions,
    likeliest,
    list_channels,
    range_regions,
    row_regions,
    step_regions,
)
from minimax_tools.errors import number_ranges, word_ranges
from minimax_tools.results.results import WrongRegion

EVERYWHERE = torch.ones(100, dtype=torch.bool)
# Two rows of fifty tokens, and five rows of twenty.
TOKENS, ROWS = torch.arange(100) % 50, torch.arange(100) // 20


def items(*numbers: int, total: int = 100) -> torch.Tensor:
    held = torch.zeros(total, dtype=torch.bool)
    held[list(numbers)] = True
    return held


def region(held: torch.Tensor, *, num_choices: float = 1.0, words: str = "") -> Region:
    return Region(words=words, items=held, num_choices=num_choices)


def word_regions(regions: Iterable[Region]) -> str:
    lines = [
        f"{one.words}: {dict(one.numbers)}, {one.num_choices:g} choices; items "
        + ", ".join(word_ranges(number_ranges(one.items.nonzero().flatten().tolist())))
        for one in regions
    ]
    return "\n".join(lines) or "none"


def of_experts(wrong: int, experts: list[list[int]], within: torch.Tensor | None = None) -> str:
    """Regions of experts where the first tokens, so many, are wrong."""
    everywhere = torch.ones(len(experts), dtype=torch.bool)
    is_wrong = torch.arange(len(experts)) < wrong
    found = expert_regions(is_wrong, torch.tensor(experts), everywhere if within is None else within)
    return word_regions(found)


def in_range(*wrong: int, within: torch.Tensor = EVERYWHERE, kind: str = "tokens") -> str:
    return word_regions(range_regions(items(*wrong), TOKENS, within, word="at token", kind=kind))


def listed(tokens: dict[int, list[int]]) -> str:
    places = [(row, token) for row, of_row in tokens.items() for token in of_row]
    return str(TokenList.of(reversed(places)))


def test_regions_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    within = (TOKENS >= 10) & (TOKENS < 30)
    first_six = torch.arange(12) < 6
    experts = {
        # All wrong tokens use 2; the first uses 1 too, and right tokens use 9.
        "the expert of most wrong tokens": of_experts(3, [[1, 2], [3, 2], [4, 2], *[[9, 10]] * 9]),
        "of fewest right tokens": of_experts(3, [*[[1, 2]] * 3, *[[1, 3]] * 9]),
        "of fewest right tokens, named second": of_experts(3, [*[[2, 1]] * 3, *[[1, 3]] * 9]),
        # 1 is used by all right tokens too, but 2 by one wrong token only.
        "hits count more than misses": of_experts(3, [[1, 2], [1, 3], [1, 4], *[[1, 7]] * 9]),
        "two of eight experts": of_experts(2, [[5], [3], *[[7]] * 10]),
        "two of seven experts are more than a quarter": of_experts(2, [[5], [3], *[[6]] * 10]),
        "one of three experts may be named": of_experts(2, [*[[1]] * 2, *[[2]] * 10]),
        "tokens outside need no expert": of_experts(2, [[5], [3], *[[7]] * 10], torch.arange(12) != 1),
        # Of the tokens within, right ones use 2 more than 1; of all tokens 1.
        "right tokens outside are no misses": of_experts(
            3, [*[[1, 2]] * 3, *[[2, 3]] * 3, *[[1, 3]] * 6], first_six
        ),
        "right tokens everywhere are": of_experts(3, [*[[1, 2]] * 3, *[[2, 3]] * 3, *[[1, 3]] * 6]),
    }
    ranges = {
        "a range to the end, and one between": in_range(4, 56),
        "a single number": in_range(4, 54),
        "a range of all numbers": in_range(0, 49),
        "all but the last number": in_range(0, 48),
        "all but the first number": in_range(1, 49),
        "a range within others": in_range(15, 20, within=within),
        "all of these": in_range(10, 29, within=within),
        "some kinds list all numbers": in_range(4, 6, kind="experts"),
    }
    others = {
        **{
            f"steps of {wrong}": word_regions(step_regions(items(*wrong), TOKENS, EVERYWHERE))
            for wrong in ((7, 17, 37, 57), (7, 17), (7, 8, 19), (7, 57))
        },
        **{
            f"rows {rows}": word_regions(row_regions(items(*(20 * row for row in rows)), ROWS))
            for rows in ((2,), (1, 2), (0, 2), (0, 1, 3, 4))
        },
        **{
            f"heads of {head_dim} channels": word_regions(channel_regions(items(23, 43), head_dim, "channel"))
            for head_dim in (10, None, 30)
        },
    }
    lists = {
        f"tokens {tokens}": listed(tokens)
        for tokens in (
            {0: [31, 63, 95, 127]},
            {1: [4, 5, 6, 7, 8]},
            {0: [2, 3, 9], 2: [2, 3, 9]},
            {0: [7, 15, 47, 71, 95], 1: [7]},
            # Three numbers of one parity are chance.
            {0: [1, 5, 11]},
            {3: [8]},
            {0: [*range(0, 45, 3)]},
        )
    }
    channels = {
        f"{word}s {wrong}": "{}: {}".format(*list_channels(items(*wrong), word))
        for word, wrong in (("channel", (3, 17, 18)), ("expert", (3, 17)))
    }
    expect_text("regions.txt", {**experts, **ranges, **others, **lists, **channels})


class TestChance:
    """The chance that some region of `size` of 100 items holds all wrong ones is choices · C(size, n) / C(100, n)."""

    @pytest.mark.parametrize(("num_wrong", "size"), [(10, 10), (5, 10), (1, 1), (20, 60)])
    def test_region_counts_if_chance_is_below_a_millionth(self, num_wrong: int, size: int) -> None:
        wrong, held = items(*range(num_wrong)), items(*range(size))
        most = 1e-6 * math.comb(100, num_wrong) / math.comb(size, num_wrong)
        for num_choices, counts in ((0.99 * most, True), (1.01 * most, False)):
            found = likeliest(wrong, [region(held, num_choices=num_choices)])
            assert (found is not None) is counts

    def test_region_narrows_another_if_chance_is_below_a_thousandth(self) -> None:
        wrong, outer, inner = items(0, 1, 2), items(*range(40)), items(*range(10), 99)
        # Within the outer region there are 40 items, of which the inner holds 10.
        most = 1e-3 * math.comb(40, 3) / math.comb(10, 3)
        for num_choices, adds in ((0.99 * most, True), (1.01 * most, False)):
            assert region(inner, num_choices=num_choices).adds_to(region(outer), wrong) is adds

    def test_region_without_all_wrong_items_never_counts(self) -> None:
        assert likeliest(items(*range(20)), [region(items(*range(19)), num_choices=1e-30)]) is None
        assert likeliest(items(), [region(items(1), num_choices=1e-30)]) is None
        assert likeliest(items(1), []) is None

    @pytest.mark.parametrize(("total", "most"), [(50, 45), (100, 92), (200, 192)])
    def test_region_of_nearly_all_items_says_nothing(self, total: int, most: int) -> None:
        wrong = items(1, total=total)
        for size, counts in ((most, True), (most + 1, False)):
            held = region(items(*range(size), total=total), num_choices=1e-30)
            assert (likeliest(wrong, [held]) is not None) is counts

    def test_region_of_least_chance_is_told_however_small_another_is(self) -> None:
        wrong = items(*range(20))
        small = region(items(*range(20)), num_choices=1e6, words="small")
        for size, words in ((25, "simple"), (40, "small")):
            simple = region(items(*range(size)), num_choices=2.0, words="simple")
            found = likeliest(wrong, [small, simple])
            assert found is not None
            assert found.words == words


def test_list_is_a_region_if_the_rows_have_one_list() -> None:
    found = TokenList.of([(0, 31), (0, 63), (0, 95)]).region(of=192)
    tokens = ((31, 31), (63, 63), (95, 95))
    assert found == WrongRegion(num_wrong=3, num_held=3, of=192, rows=(0,), tokens=tokens, every=32)
    assert TokenList.of([(0, 31), (1, 63)]).region(of=192) is None


def test_intersection_has_all_choices_of_both() -> None:
    first = Region(words="in row 1", items=items(1, 2, 3), num_choices=3.0, numbers={"rows": (1,)})
    second = Region(words="at token 2", items=items(2, 3, 4), num_choices=5.0, numbers={"tokens": ((2, 2),)})
    both = first & second
    assert (both.words, both.size, both.num_choices) == ("in row 1, at token 2", 2, 15.0)
    result = both.as_result(items(3))
    assert result == WrongRegion(num_wrong=1, num_held=2, of=100, rows=(1,), tokens=((2, 2),))
