"""Regions: their items, words, numbers and chances, each by hand."""

from __future__ import annotations

import math

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
from minimax_tools.results.results import WrongRegion


def items(*numbers: int, total: int = 100) -> torch.Tensor:
    held = torch.zeros(total, dtype=torch.bool)
    held[list(numbers)] = True
    return held


def region(held: torch.Tensor, *, num_choices: float = 1.0, words: str = "") -> Region:
    return Region(words=words, items=held, num_choices=num_choices)


class TestExperts:
    EVERYWHERE = torch.ones(12, dtype=torch.bool)

    def find(
        self, wrong: torch.Tensor, experts: torch.Tensor, within: torch.Tensor | None = None
    ) -> list[Region]:
        return [*expert_regions(wrong, experts, self.EVERYWHERE if within is None else within)]

    def test_expert_of_most_wrong_tokens_is_chosen_first(self) -> None:
        # All wrong tokens use 2; the first uses 1 too, and right tokens use 9.
        experts = torch.tensor([[1, 2], [3, 2], [4, 2]] + [[9, 10]] * 9)
        (found,) = self.find(items(0, 1, 2, total=12), experts)
        assert (found.words, found.numbers, found.num_choices) == ("of expert 2", {"experts": (2,)}, 11)
        assert found.items.tolist() == [True] * 3 + [False] * 9

    def test_among_equals_the_expert_of_fewest_right_tokens_is_chosen(self) -> None:
        for first, second in ((1, 2), (2, 1)):
            experts = torch.tensor([[first, second]] * 3 + [[1, 3]] * 9)
            (found,) = self.find(items(0, 1, 2, total=12), experts)
            assert found.numbers == {"experts": (2,)}

    def test_hits_count_more_than_misses(self) -> None:
        experts = torch.tensor([[1, 2], [1, 3], [1, 4]] + [[1, 7]] * 9)
        # 1 is used by all right tokens too, but 2 by one wrong token only.
        (found,) = self.find(items(0, 1, 2, total=12), experts)
        assert found.numbers == {"experts": (1,)}

    def test_several_experts_are_chosen_up_to_a_quarter(self) -> None:
        experts = torch.tensor([[5], [3]] + [[7]] * 10)
        (found,) = self.find(items(0, 1, total=12), experts)
        assert (found.words, found.numbers, found.num_choices) == ("of experts 3, 5", {"experts": (3, 5)}, 28)
        experts[11] = 6
        # Of seven experts a quarter is one.
        assert self.find(items(0, 1, total=12), experts.clamp(max=6)) == []
        # Of three experts one may be named.
        few = torch.tensor([[1]] * 2 + [[2]] * 10)
        assert [found.numbers for found in self.find(items(0, 1, total=12), few)] == [{"experts": (1,)}]

    def test_tokens_outside_need_no_expert(self) -> None:
        experts = torch.tensor([[5], [3]] + [[7]] * 10)
        (found,) = self.find(items(0, 1, total=12), experts, items(0, *range(2, 12), total=12))
        assert found.numbers == {"experts": (5,)}

    def test_right_tokens_outside_are_no_misses(self) -> None:
        # Of the tokens within, right ones use 2 more than 1; of all tokens 1.
        experts = torch.tensor([[1, 2]] * 3 + [[2, 3]] * 3 + [[1, 3]] * 6)
        (found,) = self.find(items(0, 1, 2, total=12), experts, items(*range(6), total=12))
        assert found.numbers == {"experts": (1,)}
        (found,) = self.find(items(0, 1, 2, total=12), experts)
        assert found.numbers == {"experts": (2,)}


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


class TestSteps:
    TOKENS = torch.arange(100) % 50
    EVERYWHERE = torch.ones(100, dtype=torch.bool)

    def find(self, *wrong: int) -> list[Region]:
        return [*step_regions(items(*wrong), self.TOKENS, self.EVERYWHERE)]

    def test_every_so_many_tokens(self) -> None:
        (found,) = self.find(7, 17, 37, 57)
        assert found.words == "at every 10th token from 7 on"
        assert (found.numbers, found.num_choices) == ({"tokens": ((7, 49),), "every": 10}, 2500.0)
        assert found.items.nonzero().flatten().tolist() == [7, 17, 27, 37, 47, 57, 67, 77, 87, 97]

    @pytest.mark.parametrize("wrong", [(7, 17), (7, 8, 19), (7, 57)])
    def test_others_have_no_step(self, wrong: tuple[int, ...]) -> None:
        assert self.find(*wrong) == []


class TestLists:
    @pytest.mark.parametrize(
        ("tokens", "words"),
        [
            ({0: [31, 63, 95, 127]}, "row 0: 31, 63, 95, 127: every 32nd"),
            ({1: [4, 5, 6, 7, 8]}, "row 1: 4-8"),
            ({0: [2, 3, 9], 2: [2, 3, 9]}, "rows 0, 2: 2-3, 9"),
            (
                {0: [7, 15, 47, 71, 95], 1: [7]},
                "row 0: 7, 15, 47, 71, 95, and row 1: 7: each 7 plus a multiple of 8",
            ),
            # Three numbers of one parity are chance.
            ({0: [1, 5, 11]}, "row 0: 1, 5, 11"),
            ({3: [8]}, "row 3: 8"),
            (
                {0: [*range(0, 45, 3)]},
                "row 0: 0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33 and 3 more: every 3rd",
            ),
        ],
    )
    def test_tokens_are_listed_by_row_with_their_rule(self, tokens: dict[int, list[int]], words: str) -> None:
        places = [(row, token) for row, of_row in tokens.items() for token in of_row]
        assert str(TokenList.of(reversed(places))) == words

    def test_list_is_a_region_if_the_rows_have_one_list(self) -> None:
        found = TokenList.of([(0, 31), (0, 63), (0, 95)]).region(of=192)
        assert found == WrongRegion(
            num_wrong=3, num_held=3, of=192, rows=(0,), tokens=((31, 31), (63, 63), (95, 95)), every=32
        )
        assert TokenList.of([(0, 31), (1, 63)]).region(of=192) is None

    def test_channels_are_listed(self) -> None:
        words, found = list_channels(items(3, 17, 18), "channel")
        assert (words, found.channels) == ("channels 3, 17-18", ((3, 3), (17, 18)))
        words, found = list_channels(items(3, 17), "expert")
        assert (words, found.experts) == ("experts 3, 17", (3, 17))


def test_intersection_has_all_choices_of_both() -> None:
    first = Region(words="in row 1", items=items(1, 2, 3), num_choices=3.0, numbers={"rows": (1,)})
    second = Region(words="at token 2", items=items(2, 3, 4), num_choices=5.0, numbers={"tokens": ((2, 2),)})
    both = first & second
    assert (both.words, both.size, both.num_choices) == ("in row 1, at token 2", 2, 15.0)
    result = both.as_result(items(3))
    assert (result.num_wrong, result.num_held, result.of) == (1, 2, 100)
    assert (result.rows, result.tokens) == ((1,), ((2, 2),))


class TestRanges:
    NUMBERS = torch.arange(100) % 50

    def find(self, *wrong: int, within: torch.Tensor | None = None, kind: str = "tokens") -> list[Region]:
        within = torch.ones(100, dtype=torch.bool) if within is None else within
        return [*range_regions(items(*wrong), self.NUMBERS, within, word="at token", kind=kind)]

    def test_range_to_the_end_and_range_between(self) -> None:
        onwards, between = self.find(4, 56)
        assert (onwards.words, onwards.num_choices, onwards.numbers) == (
            "at tokens from 4 on",
            50.0,
            {"tokens": ((4, 49),)},
        )
        assert (between.words, between.num_choices, between.numbers) == (
            "at tokens 4 to 6",
            2500.0,
            {"tokens": ((4, 6),)},
        )
        assert onwards.items.tolist() == (self.NUMBERS >= 4).tolist()
        assert between.items.tolist() == ((self.NUMBERS >= 4) & (self.NUMBERS <= 6)).tolist()

    def test_single_number(self) -> None:
        assert [found.words for found in self.find(4, 54)] == ["at tokens from 4 on", "at token 4"]

    def test_range_of_all_numbers_is_none(self) -> None:
        assert self.find(0, 49) == []
        assert [found.words for found in self.find(0, 48)] == ["at tokens 0 to 48"]
        assert [found.words for found in self.find(1, 49)] == ["at tokens from 1 on"]

    def test_items_within_tell_how_many_ranges_there_are(self) -> None:
        within = (self.NUMBERS >= 10) & (self.NUMBERS < 30)
        onwards, between = self.find(15, 20, within=within)
        assert (onwards.num_choices, onwards.numbers) == (20.0, {"tokens": ((15, 29),)})
        assert between.num_choices == 400.0
        assert self.find(10, 29, within=within) == []

    def test_some_kinds_list_all_numbers(self) -> None:
        _, between = self.find(4, 6, kind="experts")
        assert between.numbers == {"experts": (4, 5, 6)}


class TestRowsAndHeads:
    @pytest.mark.parametrize(
        ("rows", "words", "num_choices"),
        [
            ((2,), "in row 2", 5),
            ((1, 2), "in rows 1-2", 10),
            ((0, 2), "in rows 0, 2", 10),
            ((0, 1, 3, 4), "in rows 0-1, 3-4", 5),
        ],
    )
    def test_rows_with_wrong_tokens(self, rows: tuple[int, ...], words: str, num_choices: int) -> None:
        row_of = torch.arange(100) // 20
        (found,) = row_regions(items(*(20 * row for row in rows)), row_of)
        assert (found.words, found.num_choices, found.numbers) == (words, num_choices, {"rows": rows})
        assert found.items.tolist() == torch.isin(row_of, torch.tensor(rows)).tolist()

    def test_heads_and_their_dims(self) -> None:
        heads, dims_on, dims, onwards, between = channel_regions(items(23, 43), 10, "channel")
        assert (heads.words, heads.num_choices, heads.numbers) == ("of heads 2, 4", 45, {"heads": (2, 4)})
        assert (dims_on.words, dims.words) == ("in dims from 3 on of each head", "in dim 3 of each head")
        assert (dims.size, dims.numbers, dims.num_choices) == (10, {"dims": ((3, 3),)}, 100.0)
        assert (onwards.words, between.words) == ("from channels from 23 on", "from channels 23 to 43")

    def test_channels_that_are_no_whole_heads_have_no_heads(self) -> None:
        for head_dim in (None, 30):
            assert [found.words for found in channel_regions(items(23, 43), head_dim, "channel")] == [
                "from channels from 23 on",
                "from channels 23 to 43",
            ]
