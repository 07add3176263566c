"""The wrong tokens and channels of a site: the report says what they have in common, and only that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compare.blame.sentences import Bounds, TokenFacts, Where, describe_regions
from compare.noise.rho import noise_ratio, token_ratios
from compare.noise.rows import Rows
from minimax_tools.results.results import WrongRegion

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


def is_right(rows: Rows) -> bool:
    """The limits of these tests, for part of a site: on all values, and on one token."""
    return noise_ratio(rows).whole <= 1.3 and float(token_ratios(rows).max()) <= BOUNDS.token


def find(rows: Rows, *, bounds: Bounds = BOUNDS, channel_word: str = "channel", **known: Any) -> Where:
    head_dim = known.pop("head_dim", None)
    return describe_regions(
        rows,
        bounds=bounds,
        is_right=is_right,
        facts=TokenFacts(**known),
        head_dim=head_dim,
        channel_word=channel_word,
    )


def describe(rows: Rows, **known: Any) -> tuple[str, ...]:
    return find(rows, **known).sentences


def everywhere() -> torch.Tensor:
    return torch.ones(ROWS * LENGTH, dtype=torch.bool)


def test_right_rows_have_no_wrong_place() -> None:
    assert describe(right_rows(), head_dim=HEAD_DIM) == ()


def test_an_error_of_all_tokens_and_channels_has_no_place() -> None:
    assert describe(spoilt(everywhere()), head_dim=HEAD_DIM) == (
        "no token is near the floor: the best has ρ 604",
    )


def test_wrong_tokens_scattered_by_chance_are_listed_without_a_rule() -> None:
    tokens = torch.rand(ROWS * LENGTH, generator=torch.Generator().manual_seed(2)) < 0.3
    experts = torch.randint(0, 32, (ROWS * LENGTH, 4), generator=torch.Generator().manual_seed(3))
    assert describe(spoilt(tokens), experts=experts) == (
        "wrong tokens: 31 of 120, row 0: 7, 9, 17, 20, 27-31, 35, 39, and row 1: 1, 21, 27, 30, 32 and 11 more; "
        "the 89 others are right",
    )


def test_few_wrong_tokens_are_listed_with_their_rule() -> None:
    places = right_rows().places
    tokens = (places[:, 0] == 0) & (places[:, 1] % 8 == 7)
    where = find(spoilt(tokens, torch.arange(HEADS * HEAD_DIM) < 40))
    # Of five tokens no channels are told: those of each are its own.
    assert where.sentences == ("wrong tokens: row 0: 7, 15, 23, 31, 39: every 8th; the 115 others are right",)
    assert where.tokens == ((0, 7), (0, 15), (0, 23), (0, 31), (0, 39))
    assert [region.every for region in where.regions] == [8]


def test_others_are_not_called_right_if_they_are_not() -> None:
    """No token is right, and some are more wrong than others: no pattern is told."""
    more = torch.arange(ROWS * LENGTH) % LENGTH >= 20
    rows = spoilt(everywhere())
    half = rows.reference + (rows.target - rows.reference) / 8
    rows = replace(rows, target=torch.where(more[:, None], rows.target, half))
    (sentence,) = describe(rows, experts=torch.where(more, 1, 7)[:, None])
    assert sentence.startswith("no token is near the floor: the best has ρ ")


def test_others_that_are_far_below_have_their_error_told() -> None:
    few = torch.arange(ROWS * LENGTH) >= 2 * LENGTH
    rows = spoilt(everywhere())
    little = rows.reference + (rows.target - rows.reference) / 600
    rows = replace(rows, target=torch.where(few[:, None], rows.target, little))
    (sentence,) = describe(rows)
    assert sentence.startswith("wrong tokens: all 40 in row 2; the 80 others are at ρ ")


def test_tokens_far_above_all_others_are_wrong_below_the_limit_of_one() -> None:
    ratios = torch.ones(ROWS * LENGTH)
    ratios[[31, 95]] = torch.tensor([2.9, 2.0])
    assert describe(TestLimits.rows_off(ratios)) == (
        "wrong tokens: row 0: 31, and row 2: 15; the 118 others are right",
    )
    # Without a gap below them they might be right.
    ratios[:8] = torch.linspace(1.4, 2.0, 8)
    assert describe(TestLimits.rows_off(ratios)) == ()


class TestScale:
    @staticmethod
    def scaled(factors: torch.Tensor | float) -> Rows:
        rows = right_rows()
        assert rows.twin is not None
        return replace(rows, target=(rows.twin * factors).bfloat16())

    @pytest.mark.parametrize(
        ("factors", "words"),
        [
            (0.993, "the port's values are 0.993 times the golden's"),
            (
                torch.linspace(0.5, 2, HEADS * HEAD_DIM),
                "each channel is a multiple of the golden's, 0.500 to 2.00 times",
            ),
            (
                torch.tensor([1.0, 0.5, 2.0, 1.5]).repeat_interleave(HEAD_DIM),
                "each head is a multiple of the golden's, 0.500 to 2.00 times",
            ),
            (
                torch.linspace(0.9, 1.1, ROWS * LENGTH)[:, None],
                "each token is a multiple of the golden's, 0.901 to 1.10 times",
            ),
        ],
    )
    def test_factors_that_leave_noise_are_told(self, factors: torch.Tensor | float, words: str) -> None:
        rows = self.scaled(factors)
        bounds = replace(BOUNDS, channel=None)
        told = describe(rows, head_dim=HEAD_DIM, bounds=bounds)
        assert told[-1] == words

    def test_factors_that_leave_more_are_not(self) -> None:
        rows = self.scaled(0.9)
        noise = torch.randn(rows.target.shape, generator=torch.Generator().manual_seed(4)) / 50
        (sentence,) = describe(replace(rows, target=rows.target + noise.bfloat16()))
        assert sentence.startswith("no token is near the floor")


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
    assert describe(spoilt(tokens)) == ("wrong tokens: row 1: 4-11; the 112 others are right",)


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
    assert not any("channels" in told for told in describe(rows, bounds=bounds, head_dim=HEAD_DIM))


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
        "NaN or Inf: all 30 at tokens from 30 on; the 90 others are finite",
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
    """So many wrong items are told by their region; one less might be there by chance, and is listed."""

    @pytest.mark.parametrize(("number", "words"), [(12, "row 1: 0-10, 39"), (13, "13 of the 40 in row 1")])
    def test_a_row_of_three(self, number: int, words: str) -> None:
        tokens = ~everywhere()
        tokens[scattered(LENGTH, number, LENGTH)] = True
        num_others = 120 - number if number == 12 else 80
        assert describe(spoilt(tokens)) == (f"wrong tokens: {words}; the {num_others} others are right",)

    @pytest.mark.parametrize("start", [38, 10])
    def test_a_range_of_two_places_in_three_rows(self, start: int) -> None:
        tokens = (right_rows().places[:, 1] - start).clamp(min=-1) // 2 == 0
        words = f"rows 0-2: {start}-{start + 1}"
        assert describe(spoilt(tokens)) == (f"wrong tokens: {words}; the 114 others are right",)

    @pytest.mark.parametrize(
        ("number", "words"),
        [(9, "channels 32-39, 47; the 55 others"), (10, "channels: 10 of the 16 of head 2; the 48 others")],
    )
    def test_a_head_of_four(self, number: int, words: str) -> None:
        channels = torch.zeros(HEADS * HEAD_DIM, dtype=torch.bool)
        channels[scattered(2 * HEAD_DIM, number, HEAD_DIM)] = True
        told = describe(spoilt(everywhere(), channels), head_dim=HEAD_DIM)
        assert told == (f"wrong {words} are right",)

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
    def find(rows: Rows, **known: Any) -> tuple[WrongRegion, ...]:
        return find(rows, **known).regions

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
        two = spoilt((experts[:, 0] == 3) | (experts[:, 0] == 5))
        assert not any(region.experts for region in self.find(two, experts=experts))

    def test_decoded_tokens(self) -> None:
        decoded = (right_rows().places[:, 1] % 7) == 3
        (region,) = self.find(spoilt(decoded), decoded=decoded)
        assert region.is_decoded is True
        (region,) = self.find(spoilt(~decoded), decoded=decoded)
        assert region.is_decoded is False


class TestLimits:
    """Tokens and channels a little above and below their limits, by errors of as many noise floors."""

    @staticmethod
    def rows_off(token: torch.Tensor | float = 1.0, channel: torch.Tensor | float = 1.0) -> Rows:
        """Rows whose golden is off by 1 in each channel, and the port by so many times that."""
        twin = torch.full((ROWS * LENGTH, HEADS * HEAD_DIM), 100.0)
        by_token = torch.as_tensor(token).expand(ROWS * LENGTH)[:, None]
        by_channel = torch.as_tensor(channel).expand(HEADS * HEAD_DIM)
        # In no token, and in no channel, do errors add up.
        sign = 1.0 - 2.0 * (torch.arange(ROWS * LENGTH)[:, None] + torch.arange(HEADS * HEAD_DIM)).remainder(
            2
        )
        return replace(
            right_rows(), reference=twin + 1.0, target=twin + sign * by_token * by_channel, twin=twin
        )

    def test_clearly_wrong_tokens_bring_those_half_way_to_the_limit(self) -> None:
        tokens = torch.arange(ROWS * LENGTH) % LENGTH
        # The limit is 3, and half way to it, as factors go, 1.73.
        for off, told in ((1.75, "all 45"), (1.7, "all 21")):
            ratios = torch.ones(ROWS * LENGTH)
            ratios[tokens >= 25], ratios[tokens >= 33] = off, 3.1
            (sentence, *_) = describe(self.rows_off(ratios))
            assert sentence.startswith(f"wrong tokens: {told} at tokens from {25 if off > 1.73 else 33} on")

    def test_tokens_half_way_alone_are_told_of_a_site_to_blame(self) -> None:
        ratios = torch.where(torch.arange(ROWS * LENGTH) % LENGTH >= 25, 2.9, 1.0)
        assert describe(self.rows_off(ratios)) == (
            "wrong tokens: all 45 at tokens from 25 on; the 75 others are right",
        )

    def test_limit_below_one_is_not_raised(self) -> None:
        ratios = torch.where(torch.arange(ROWS * LENGTH) % LENGTH >= 25, 0.3, 0.1)
        sentences = describe(self.rows_off(ratios), bounds=Bounds(token=0.25, channel=None))
        assert sentences[0].startswith("wrong tokens: all 45 at tokens from 25 on")

    @pytest.mark.parametrize(("off", "is_told"), [(1.99, False), (2.01, True)])
    def test_channel_above_its_limit_is_wrong(self, off: float, is_told: bool) -> None:
        channels = torch.ones(HEADS * HEAD_DIM)
        channels[20:30] = off
        told = describe(self.rows_off(channel=channels))
        assert told == (
            ("wrong channels: all 10 from channels 20 to 29; the 54 others are right",) if is_told else ()
        )

    def test_channel_of_less_noise_than_the_median_is_judged_by_the_median(self) -> None:
        rows = self.rows_off()
        reference, target = rows.reference.clone(), rows.target.clone()
        reference[:, 20:30] = 100.0
        assert describe(replace(rows, reference=reference)) == ()
        target[:, 20:30] = 102.1
        assert any("channels 20 to 29" in told for told in describe(replace(rows, target=target)))
        # A channel of more noise is judged by its own.
        assert describe(replace(rows, reference=reference * 0 + 102.1, target=target)) == ()

    def test_values_where_the_golden_is_zero_have_no_factor(self) -> None:
        rows = right_rows()
        sides = [side.clone() for side in (rows.reference, rows.target, rows.twin) if side is not None]
        for side, value in zip(sides, (0.0, 1.0, 0.0), strict=True):
            side[:, 20:30] = value
        told = describe(replace(rows, reference=sides[0], target=sides[1], twin=sides[2]))
        assert told == ("wrong channels: all 10 from channels 20 to 29; the 54 others are right",)

    @pytest.mark.parametrize(("rest", "is_told"), [(0.19, True), (0.21, False)])
    def test_multiple_may_leave_a_fifth_of_the_error(self, rest: float, is_told: bool) -> None:
        rows = right_rows()
        reference, target = rows.reference.float(), rows.reference.float()
        golden = reference[:, 20:30]
        noise = torch.randn(golden.shape, generator=torch.Generator().manual_seed(7))
        noise -= golden * (noise * golden).sum() / golden.square().sum()
        # Of an error of √(1 + r²) times the golden's size, r is left.
        share = rest / (1 - rest**2) ** 0.5
        target[:, 20:30] = 2.0 * golden + share * noise * golden.norm() / noise.norm()
        told = describe(replace(rows, reference=reference, target=target))
        assert ("the port's values there are 2 times the golden's" in told) is is_told


class TestCommonGround:
    """Facts that wrong tokens may have in common: each alone, and with another."""

    def test_tokens_of_one_pass_are_named(self) -> None:
        decoded = torch.arange(ROWS * LENGTH) % 7 == 3
        assert describe(spoilt(~decoded), decoded=decoded)[0].startswith(
            "wrong tokens: all 103 computed in one pass;"
        )

    def test_decoded_tokens_of_a_row_are_named_with_it(self) -> None:
        decoded = torch.arange(LENGTH).repeat(ROWS) % 2 == 1
        tokens = decoded & (right_rows().places[:, 0] == 1)
        told = describe(spoilt(tokens), decoded=decoded)[0]
        assert told.startswith("wrong tokens: all 20 ")
        assert "in row 1" in told
        assert "decoded one at a time" in told

    def test_positions_are_looked_at_beside_the_places(self) -> None:
        positions = torch.arange(ROWS * LENGTH).flip(0)
        told = describe(spoilt(positions >= 100), positions=positions)
        assert told[0].startswith("wrong tokens: all 20 ")
        assert "positions from 100 on" in told[0] or "in row 0" in told[0]

    @pytest.mark.parametrize(("likeness", "is_told"), [(0.985, True), (0.975, False)])
    def test_head_that_resembles_another_is_named(self, likeness: float, is_told: bool) -> None:
        rows = right_rows()
        twin = rows.reference.float()
        target = twin.clone()
        heads = twin.unflatten(1, (HEADS, HEAD_DIM))
        other = torch.randn(heads[:, 0].shape, generator=torch.Generator().manual_seed(9))
        origin = heads[:, 3]
        other -= origin * (other * origin).sum() / origin.square().sum()
        other *= origin.norm() / other.norm()
        target.unflatten(1, (HEADS, HEAD_DIM))[:, 1] = likeness * origin + (1 - likeness**2) ** 0.5 * other
        told = describe(replace(rows, reference=twin, target=target), head_dim=HEAD_DIM)
        assert ("the port holds in head 1 the golden's head 3" in told) is is_told
