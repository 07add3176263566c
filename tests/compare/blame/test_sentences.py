"""The wrong tokens and channels of a site: the report says what they have in common, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compare.blame.sentences import Bounds, describe_regions
from compare.noise.rows import Rows
from minimax_tools.results.regions import WrongRegion

ROWS, LENGTH, HEAD_DIM, HEADS = 3, 40, 16, 4
BOUNDS = Bounds(token=3.0, channel=2.0)


def right_rows() -> Rows:
    twin = torch.randn(ROWS * LENGTH, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    return Rows(
        reference=twin.bfloat16(),
        target=twin.bfloat16(),
        massive=torch.zeros(twin.shape[1], dtype=torch.bool),
        places=torch.ones(ROWS, LENGTH).nonzero(),
        twin=twin,
    )


def spoilt(tokens: torch.Tensor, channels: torch.Tensor | slice = slice(None)) -> Rows:
    """Right rows but for some tokens and channels, which are other numbers."""
    rows = right_rows()
    target = rows.target.clone()
    other = torch.randn(target.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    part = torch.zeros(target.shape, dtype=torch.bool)
    part[:, channels] = True
    part &= tokens[:, None]
    target[part] = other[part]
    return replace(rows, target=target)


def describe(rows: Rows, **known: torch.Tensor | int | None) -> tuple[str, ...]:
    arguments = {"decoded": None, "experts": None, "head_dim": None, **known}
    return describe_regions(rows, bounds=BOUNDS, **arguments)[0]  # type: ignore[arg-type]


def everywhere() -> torch.Tensor:
    return torch.ones(ROWS * LENGTH, dtype=torch.bool)


def test_right_rows_have_no_wrong_place() -> None:
    assert describe(right_rows(), head_dim=HEAD_DIM) == ()


def test_an_error_of_all_tokens_and_channels_has_no_place() -> None:
    assert describe(spoilt(everywhere()), head_dim=HEAD_DIM) == ()


def test_wrong_tokens_scattered_by_chance_have_no_place() -> None:
    tokens = torch.rand(ROWS * LENGTH, generator=torch.Generator().manual_seed(2)) < 0.3
    experts = torch.randint(0, 32, (ROWS * LENGTH, 4), generator=torch.Generator().manual_seed(3))
    assert describe(spoilt(tokens), experts=experts) == ()


def test_rows_of_the_batch_are_named() -> None:
    places = right_rows().places
    assert describe(spoilt(places[:, 0] > 0)) == (
        "wrong tokens: all 80 in rows 1-2; the 40 others are right",
    )


def test_a_place_within_another_needs_a_reason_of_its_own() -> None:
    places = right_rows().places
    tokens = (places[:, 0] > 0) & (places[:, 1] < 38) & (torch.arange(ROWS * LENGTH) % 3 > 0)
    (sentence,) = describe(spoilt(tokens))
    assert sentence == f"wrong tokens: {int(tokens.sum())} of the 80 in rows 1-2; the 40 others are right"


def test_positions_from_one_on_are_named() -> None:
    places = right_rows().places
    assert describe(spoilt(places[:, 1] >= 33)) == (
        "wrong tokens: all 21 at tokens from 33 on; the 99 others are right",
    )


def test_positions_of_one_row_are_named_with_the_row() -> None:
    places = right_rows().places
    tokens = (places[:, 0] == 1) & (places[:, 1] >= 4) & (places[:, 1] <= 11)
    assert describe(spoilt(tokens)) == (
        "wrong tokens: all 8 in row 1, at tokens 4 to 11; the 112 others are right",
    )


def test_the_tokens_of_an_expert_are_named_where_not_all_are_wrong() -> None:
    experts = torch.stack(
        [
            torch.randperm(16, generator=torch.Generator().manual_seed(token))[:4]
            for token in range(ROWS * LENGTH)
        ]
    )
    of_expert = (experts == 11).any(dim=1)
    tokens = of_expert & (torch.arange(ROWS * LENGTH) % 3 > 0)
    (sentence,) = describe(spoilt(tokens), experts=experts)
    assert sentence == (
        f"wrong tokens: {int(tokens.sum())} of the {int(of_expert.sum())} of expert 11; "
        f"the {int((~of_expert).sum())} others are right"
    )


def test_decoded_tokens_are_named() -> None:
    places = right_rows().places
    decoded = (places[:, 1] % 7) == 3
    assert describe(spoilt(decoded), decoded=decoded)[0].startswith(
        "wrong tokens: all 18 decoded one at a time;"
    )


def test_a_head_is_named() -> None:
    channels = torch.arange(HEADS * HEAD_DIM) // HEAD_DIM == 2
    assert describe(spoilt(everywhere(), channels), head_dim=HEAD_DIM) == (
        "wrong channels: all 16 of head 2; the 48 others are right",
    )


def test_channels_without_a_limit_are_not_looked_for() -> None:
    rows = spoilt(everywhere(), torch.arange(HEADS * HEAD_DIM) < HEAD_DIM)
    bounds = replace(BOUNDS, channel=None)
    assert describe_regions(rows, bounds=bounds, decoded=None, experts=None, head_dim=HEAD_DIM) == ((), ())


def test_dims_of_every_head_are_named() -> None:
    channels = torch.arange(HEADS * HEAD_DIM) % HEAD_DIM >= 8
    assert describe(spoilt(everywhere(), channels), head_dim=HEAD_DIM) == (
        "wrong channels: all 32 in dims from 8 on of each head; the 32 others are right",
    )


def test_a_run_of_channels_is_named_and_by_what_it_is_scaled() -> None:
    rows = right_rows()
    target = rows.target.clone()
    target[:, 20:30] *= 1.25
    assert describe(replace(rows, target=target)) == (
        "wrong channels: all 10 from channels 20 to 29; the 54 others are right",
        "the port's values there are 1.25 times the golden's",
    )


def test_channels_that_are_zero_are_said_to_be() -> None:
    rows = right_rows()
    target = rows.target.clone()
    target[:, :16] = 0.0
    assert "the port's values there are all 0" in describe(replace(rows, target=target), head_dim=HEAD_DIM)


def test_heads_that_changed_places_are_named() -> None:
    rows = right_rows()
    heads = rows.target.unflatten(-1, (HEADS, HEAD_DIM))
    target = heads[:, [0, 2, 1, 3]].flatten(1)
    assert describe(replace(rows, target=target), head_dim=HEAD_DIM) == (
        "wrong channels: all 32 of heads 1-2; the 32 others are right",
        "the port holds in head 1 the golden's head 2, in head 2 the golden's head 1",
    )


def test_values_of_the_other_sign_are_a_multiple_too() -> None:
    rows = right_rows()
    target = rows.target.clone()
    target[:, 20:30] *= -1.0
    assert "the port's values there are -1 times the golden's" in describe(replace(rows, target=target))


def test_tokens_of_nan_are_named() -> None:
    rows = right_rows()
    target = rows.target.clone()
    target[rows.places[:, 1] >= 30, 3] = torch.nan
    assert describe(replace(rows, target=target), head_dim=HEAD_DIM) == (
        "NaN or Inf: all 30 at tokens from 30 on; the 90 others are right",
    )


def test_tokens_that_are_hardly_wrong_count_beside_clearly_wrong_ones() -> None:
    tokens = torch.arange(ROWS * LENGTH) % LENGTH >= 30
    rows = spoilt(tokens)
    # Two of three tokens are off by less than the limit of one token.
    rows.target[tokens] = torch.where(
        (torch.arange(int(tokens.sum())) % 3 == 0)[:, None],
        rows.target[tokens],
        rows.reference[tokens] + (rows.target[tokens] - rows.reference[tokens]) / 300,
    )
    assert any("at tokens from 30 on" in sentence for sentence in describe(rows, head_dim=HEAD_DIM))


def test_positions_are_told_where_rows_begin_elsewhere() -> None:
    # The second and third row begin at position 1000: all of their tokens are wrong.
    positions = torch.arange(LENGTH).repeat(ROWS)
    positions[LENGTH:] += 1000
    (sentence, *_) = describe(spoilt(positions >= 16), positions=positions)
    assert "at positions from 16 on; the 16 others are right" in sentence


def scattered(first: int, number: int, step: int) -> torch.Tensor:
    """Numbers of which the first and the last are as far apart as `number` of 40 or 16 can be."""
    return first + torch.tensor([*range(number - 1), step - 1])


class TestChance:
    """So many wrong items are told, one less might be there by chance: among all regions, with less than 1e-6."""

    @pytest.mark.parametrize(("number", "is_told"), [(12, False), (13, True)])
    def test_a_row_of_three(self, number: int, is_told: bool) -> None:
        tokens = ~everywhere()
        tokens[scattered(LENGTH, number, LENGTH)] = True
        told = describe(spoilt(tokens))
        assert told == (
            (f"wrong tokens: {number} of the 40 in row 1; the 80 others are right",) if is_told else ()
        )

    @pytest.mark.parametrize(("start", "words"), [(38, "tokens from 38 on"), (10, "tokens 10 to 11")])
    def test_a_range_of_two_places_in_three_rows(self, start: int, words: str) -> None:
        tokens = (right_rows().places[:, 1] - start).clamp(min=-1) // 2 == 0
        assert describe(spoilt(tokens)) == (f"wrong tokens: all 6 at {words}; the 114 others are right",)
        tokens[int(tokens.nonzero()[2])] = False
        assert describe(spoilt(tokens)) == ()

    @pytest.mark.parametrize(("number", "is_told"), [(9, False), (10, True)])
    def test_a_head_of_four(self, number: int, is_told: bool) -> None:
        channels = torch.zeros(HEADS * HEAD_DIM, dtype=torch.bool)
        channels[scattered(2 * HEAD_DIM, number, HEAD_DIM)] = True
        told = describe(spoilt(everywhere(), channels), head_dim=HEAD_DIM)
        sentence = f"wrong channels: {number} of the 16 of head 2; the 48 others are right"
        assert told == ((sentence,) if is_told else ())

    def test_a_region_of_all_but_seven_tokens_says_nothing(self) -> None:
        rows = right_rows()
        rows = replace(rows, places=torch.stack([torch.zeros(120), torch.arange(120)], dim=1).long())
        for right, told in (
            (8, ("wrong tokens: all 112 at tokens from 8 on; the 8 others are right",)),
            (7, ()),
        ):
            target = torch.where(rows.places[:, 1:] >= right, spoilt(everywhere()).target, rows.target)
            assert describe(replace(rows, target=target)) == told


class TestRegions:
    """The sentences' places as numbers."""

    @staticmethod
    def find(rows: Rows, **known: torch.Tensor | int | str | None) -> tuple[WrongRegion, ...]:
        arguments = {"decoded": None, "experts": None, "head_dim": None, **known}
        return describe_regions(rows, bounds=BOUNDS, **arguments)[1]  # type: ignore[arg-type]

    def test_rows_and_tokens(self) -> None:
        places = right_rows().places
        tokens = (places[:, 0] == 1) & (places[:, 1] >= 4) & (places[:, 1] <= 11)
        assert self.find(spoilt(tokens)) == (
            WrongRegion(num_wrong=8, num_held=8, of=120, rows=(1,), tokens=((4, 11),)),
        )

    def test_tokens_to_the_end(self) -> None:
        (region,) = self.find(spoilt(right_rows().places[:, 1] >= 33))
        assert region.tokens == ((33, 39),)

    def test_heads_and_dims(self) -> None:
        channels = torch.arange(HEADS * HEAD_DIM)
        (head,) = self.find(spoilt(everywhere(), channels // HEAD_DIM == 2), head_dim=HEAD_DIM)
        assert head == WrongRegion(num_wrong=16, num_held=16, of=64, heads=(2,))
        (dims,) = self.find(spoilt(everywhere(), channels % HEAD_DIM >= 8), head_dim=HEAD_DIM)
        assert (dims.heads, dims.dims) == ((), ((8, 15),))

    def test_channels_and_experts(self) -> None:
        channels = torch.zeros(HEADS * HEAD_DIM, dtype=torch.bool)
        channels[20:30] = True
        (region,) = self.find(spoilt(everywhere(), channels))
        assert (region.channels, region.experts) == (((20, 29),), ())
        (region,) = self.find(spoilt(everywhere(), channels), channel_word="expert")
        assert (region.channels, region.experts) == ((), tuple(range(20, 30)))

    def test_at_most_one_expert_in_four(self) -> None:
        experts = torch.arange(ROWS * LENGTH)[:, None] % 7
        assert self.find(spoilt(experts[:, 0] == 3), experts=experts)[0].experts == (3,)
        assert self.find(spoilt((experts[:, 0] == 3) | (experts[:, 0] == 5)), experts=experts) == ()

    def test_decoded_tokens(self) -> None:
        decoded = (right_rows().places[:, 1] % 7) == 3
        (region,) = self.find(spoilt(decoded), decoded=decoded)
        assert region.is_decoded is True
        (region,) = self.find(spoilt(~decoded), decoded=decoded)
        assert region.is_decoded is False

    def test_error_everywhere_has_no_region(self) -> None:
        assert self.find(spoilt(everywhere()), head_dim=HEAD_DIM) == ()
