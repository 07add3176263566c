"""The wrong tokens and channels of a site: the report says what they have in common, and only that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from compare.blame.sentences import Bounds, TokenFacts, Where, describe_order, describe_regions
from compare.noise.rho import noise_ratio, token_ratios
from compare.noise.rows import Rows

ROWS, LENGTH, HEAD_DIM, HEADS = 3, 40, 16, 4
BOUNDS = Bounds(token=3.0, channel=2.0)
ALL = torch.ones(ROWS * LENGTH, dtype=torch.bool)
ROW, TOKEN = torch.ones(ROWS, LENGTH).nonzero().T
NUMBER, CHANNEL = torch.arange(ROWS * LENGTH), torch.arange(HEADS * HEAD_DIM)


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


def of_part(rows: Rows, change: Callable[[torch.Tensor], torch.Tensor], part: Any) -> Rows:
    """Rows of which the port's values at a part are others."""
    target = rows.target.clone()
    target[part] = change(target[part])
    return replace(rows, target=target)


def scaled(factors: torch.Tensor | float) -> Rows:
    rows = right_rows()
    assert rows.twin is not None
    return replace(rows, target=(rows.twin * factors).bfloat16())


def rows_off(token: torch.Tensor | float = 1.0, channel: torch.Tensor | float = 1.0) -> Rows:
    """Rows whose golden is off by 1 in each channel, and the port by so many times that."""
    twin = torch.full((ROWS * LENGTH, HEADS * HEAD_DIM), 100.0)
    by_token = torch.as_tensor(token).expand(ROWS * LENGTH)[:, None]
    by_channel = torch.as_tensor(channel).expand(HEADS * HEAD_DIM)
    # In no token, and in no channel, do errors add up.
    sign = 1.0 - 2.0 * (NUMBER[:, None] + CHANNEL).remainder(2)
    return replace(right_rows(), reference=twin + 1.0, target=twin + sign * by_token * by_channel, twin=twin)


def wrong_by(share: float, elsewhere: torch.Tensor) -> Rows:
    """Rows that are wrong everywhere, at some tokens by a share of the error of the others."""
    rows = spoilt(ALL)
    little = rows.reference + (rows.target - rows.reference) * share
    return replace(rows, target=torch.where(elsewhere[:, None], little, rows.target))


def off_at(tokens: dict[int, float]) -> Rows:
    ratios = torch.ones(ROWS * LENGTH)
    ratios[list(tokens)] = torch.tensor(list(tokens.values()))
    return rows_off(ratios)


def experts_of_tokens() -> torch.Tensor:
    """Four of 16 experts for each token."""
    draws = [torch.randperm(16, generator=torch.Generator().manual_seed(int(token)))[:4] for token in NUMBER]
    return torch.stack(draws)


def scattered(first: int, number: int, step: int) -> torch.Tensor:
    """Numbers of which the first and the last are as far apart as `number` of 40 or 16 can be."""
    return first + torch.tensor([*range(number - 1), step - 1])


def at(numbers: torch.Tensor, total: int) -> torch.Tensor:
    return torch.isin(torch.arange(total), numbers)


OF_11 = (experts_of_tokens() == 11).any(dim=1)
DECODED = TOKEN % 7 == 3
NO_CHANNELS = replace(BOUNDS, channel=None)
HALF_AT_RANDOM = torch.rand(ROWS * LENGTH, generator=torch.Generator().manual_seed(2)) < 0.3
ANY_EXPERTS = torch.randint(0, 32, (ROWS * LENGTH, 4), generator=torch.Generator().manual_seed(3))
# The second and third row begin at position 1000: all of their tokens are wrong.
POSITIONS = TOKEN + 1000 * (ROW > 0)
# In half of the tokens an error is eight times as large, and no token is right.
MORE = TOKEN >= 20
IN_ONE_ROW = replace(right_rows(), places=torch.stack((torch.zeros(120), torch.arange(120)), dim=1).long())
TEN_CHANNELS = (CHANNEL >= 20) & (CHANNEL < 30)
MORE_IN_TEN_CHANNELS = of_part(right_rows(), lambda values: values * 1.25, (slice(None), TEN_CHANNELS))
HEAD: dict[str, Any] = {"head_dim": HEAD_DIM}
NO_LIMIT: dict[str, Any] = {**HEAD, "bounds": NO_CHANNELS}


def place(rows: Rows, **known: Any) -> str:
    """The sentences, the regions in numbers, and the wrong tokens."""
    where = find(rows, **known)
    lines = list(where.sentences) or ["nothing is told"]
    for region in where.regions:
        told = {field.name: getattr(region, field.name) for field in fields(region)}
        lines.append(
            "  " + ", ".join(f"{name} {value}" for name, value in told.items() if value not in ((), None))
        )
    return "\n".join([*lines, *([f"  wrong tokens {where.tokens}"] if where.tokens else [])])


def test_places_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    cases = {
        "right": place(right_rows(), **HEAD),
        "all tokens and channels": place(spoilt(ALL), **HEAD),
        "tokens by chance have no rule": place(spoilt(HALF_AT_RANDOM), experts=ANY_EXPERTS),
        "few tokens with their rule, and no channels": place(
            spoilt((ROW == 0) & (TOKEN % 8 == 7), CHANNEL < 40)
        ),
        "others are not right, and no pattern is told": place(
            wrong_by(1 / 8, ~MORE), experts=torch.where(MORE, 1, 7)[:, None]
        ),
        "others are far below": place(wrong_by(1 / 600, NUMBER < 2 * LENGTH)),
        "far above all others, below the limit of one": place(off_at({31: 2.9, 95: 2.0})),
        "without a gap below them they might be right": place(
            off_at({31: 2.9, 95: 2.0, **dict(enumerate(torch.linspace(1.4, 2.0, 8).tolist()))})
        ),
        "one factor": place(scaled(0.993), **NO_LIMIT),
        "a factor for each channel": place(scaled(torch.linspace(0.5, 2, HEADS * HEAD_DIM)), **NO_LIMIT),
        "a factor for each head": place(
            scaled(torch.tensor([1.0, 0.5, 2.0, 1.5]).repeat_interleave(HEAD_DIM)), **NO_LIMIT
        ),
        "a factor for each token": place(
            scaled(torch.linspace(0.9, 1.1, ROWS * LENGTH)[:, None]), **NO_LIMIT
        ),
        "a factor that leaves more than noise": place(
            of_part(
                scaled(0.9),
                lambda values: (
                    values
                    + torch.randn(values.shape, generator=torch.Generator().manual_seed(4)).bfloat16() / 50
                ),
                slice(None),
            )
        ),
        "rows of the batch": place(spoilt(ROW > 0)),
        "a place within another needs a reason of its own": place(
            spoilt((ROW > 0) & (TOKEN < 38) & (NUMBER % 3 > 0))
        ),
        "tokens from one on": place(spoilt(TOKEN >= 33)),
        "tokens of one row": place(spoilt((ROW == 1) & (TOKEN >= 4) & (TOKEN <= 11))),
        "tokens of an expert, not all wrong": place(
            spoilt(OF_11 & (NUMBER % 3 > 0)), experts=experts_of_tokens()
        ),
        "one expert in seven": place(spoilt(NUMBER % 7 == 3), experts=NUMBER[:, None] % 7),
        "two experts in seven are too many": place(
            spoilt((NUMBER % 7 == 3) | (NUMBER % 7 == 5)), experts=NUMBER[:, None] % 7
        ),
        "decoded tokens": place(spoilt(DECODED), decoded=DECODED),
        "tokens of one pass": place(spoilt(~DECODED), decoded=DECODED),
        "decoded tokens of a row": place(spoilt((TOKEN % 2 == 1) & (ROW == 1)), decoded=TOKEN % 2 == 1),
        "a head": place(spoilt(ALL, CHANNEL // HEAD_DIM == 2), **HEAD),
        "channels without a limit are not looked for": place(spoilt(ALL, CHANNEL < HEAD_DIM), **NO_LIMIT),
        "dims of every head": place(spoilt(ALL, CHANNEL % HEAD_DIM >= 8), **HEAD),
        "channels, and by what they are scaled": place(MORE_IN_TEN_CHANNELS),
        "channels that are experts": place(MORE_IN_TEN_CHANNELS, channel_word="expert"),
        "zeros": place(of_part(right_rows(), torch.zeros_like, (slice(None), slice(16))), **HEAD),
        "the other sign": place(of_part(right_rows(), torch.neg, (slice(None), slice(20, 30)))),
        "heads that changed places": place(
            of_part(
                right_rows(),
                lambda values: values.unflatten(-1, (HEADS, HEAD_DIM))[:, [0, 2, 1, 3]].flatten(1),
                slice(None),
            ),
            **HEAD,
        ),
        "NaN": place(of_part(right_rows(), lambda values: values * torch.nan, (TOKEN >= 30, 3)), **HEAD),
        "hardly wrong beside clearly wrong": place(
            replace(
                spoilt(TOKEN >= 30),
                target=torch.where(
                    ((TOKEN >= 30) & (TOKEN % 3 > 0))[:, None],
                    wrong_by(1 / 300, ALL).target,
                    spoilt(TOKEN >= 30).target,
                ),
            ),
            **HEAD,
        ),
        "positions where rows begin elsewhere": place(spoilt(POSITIONS >= 16), positions=POSITIONS),
        # So many wrong items are told by their region; one less might be there by chance, and is listed.
        "twelve tokens of a row of three": place(spoilt(at(scattered(LENGTH, 12, LENGTH), 120))),
        "thirteen tokens of a row of three": place(spoilt(at(scattered(LENGTH, 13, LENGTH), 120))),
        "a range of two places in three rows": place(spoilt((TOKEN == 10) | (TOKEN == 11))),
        "the last two places in three rows": place(spoilt(TOKEN >= 38)),
        "nine channels of a head of four": place(
            spoilt(ALL, at(scattered(2 * HEAD_DIM, 9, HEAD_DIM), 64)), **HEAD
        ),
        "ten channels of a head of four": place(
            spoilt(ALL, at(scattered(2 * HEAD_DIM, 10, HEAD_DIM), 64)), **HEAD
        ),
        "all but eight tokens": place(replace(IN_ONE_ROW, target=spoilt(NUMBER >= 8).target)),
        "all but seven tokens": place(replace(IN_ONE_ROW, target=spoilt(NUMBER >= 7).target)),
        "half way to the limit, as factors go": place(
            rows_off(torch.where(TOKEN >= 33, 3.1, torch.where(TOKEN >= 25, 1.75, 1.0)))
        ),
        "less than half way to the limit": place(
            rows_off(torch.where(TOKEN >= 33, 3.1, torch.where(TOKEN >= 25, 1.7, 1.0)))
        ),
        "half way alone, of a site to blame": place(rows_off(torch.where(TOKEN >= 25, 2.9, 1.0))),
        "a limit below one": place(
            rows_off(torch.where(TOKEN >= 25, 0.3, 0.1)), bounds=Bounds(token=0.25, channel=None)
        ),
        "channels below their limit": place(rows_off(channel=torch.where(TEN_CHANNELS, 1.99, 1.0))),
        "channels above their limit": place(rows_off(channel=torch.where(TEN_CHANNELS, 2.01, 1.0))),
    }
    expect_text("sentences.txt", cases)


def test_channel_of_less_noise_than_the_median_is_judged_by_the_median() -> None:
    rows = rows_off()
    reference, target = rows.reference.clone(), rows.target.clone()
    reference[:, 20:30] = 100.0
    assert find(replace(rows, reference=reference)).sentences == ()
    target[:, 20:30] = 102.1
    assert any("channels 20 to 29" in told for told in find(replace(rows, target=target)).sentences)
    # A channel of more noise is judged by its own.
    assert find(replace(rows, reference=reference * 0 + 102.1, target=target)).sentences == ()


def test_values_where_the_golden_is_zero_have_no_factor() -> None:
    rows = right_rows()
    sides = [side.clone() for side in (rows.reference, rows.target, rows.twin) if side is not None]
    for side, value in zip(sides, (0.0, 1.0, 0.0), strict=True):
        side[:, 20:30] = value
    told = find(replace(rows, reference=sides[0], target=sides[1], twin=sides[2])).sentences
    assert told == ("wrong channels: all 10 from channels 20 to 29; the 54 others are right",)


@pytest.mark.parametrize(("rest", "is_told"), [(0.19, True), (0.21, False)])
def test_multiple_may_leave_a_fifth_of_the_error(rest: float, is_told: bool) -> None:
    rows = right_rows()
    reference, target = rows.reference.float(), rows.reference.float()
    golden = reference[:, 20:30]
    noise = torch.randn(golden.shape, generator=torch.Generator().manual_seed(7))
    noise -= golden * (noise * golden).sum() / golden.square().sum()
    # Of an error of √(1 + r²) times the golden's size, r is left.
    share = rest / (1 - rest**2) ** 0.5
    target[:, 20:30] = 2.0 * golden + share * noise * golden.norm() / noise.norm()
    told = find(replace(rows, reference=reference, target=target)).sentences
    assert ("the port's values there are 2 times the golden's" in told) is is_told


def test_positions_are_looked_at_beside_the_places() -> None:
    positions = torch.arange(ROWS * LENGTH).flip(0)
    told = find(spoilt(positions >= 100), positions=positions).sentences
    assert told[0].startswith("wrong tokens: all 20 ")
    assert "positions from 100 on" in told[0] or "in row 0" in told[0]


@pytest.mark.parametrize(("likeness", "is_told"), [(0.985, True), (0.975, False)])
def test_head_that_resembles_another_is_named(likeness: float, is_told: bool) -> None:
    rows = right_rows()
    twin = rows.reference.float()
    target = twin.clone()
    heads = twin.unflatten(1, (HEADS, HEAD_DIM))
    other = torch.randn(heads[:, 0].shape, generator=torch.Generator().manual_seed(9))
    origin = heads[:, 3]
    other -= origin * (other * origin).sum() / origin.square().sum()
    other *= origin.norm() / other.norm()
    target.unflatten(1, (HEADS, HEAD_DIM))[:, 1] = likeness * origin + (1 - likeness**2) ** 0.5 * other
    told = find(replace(rows, reference=twin, target=target), head_dim=HEAD_DIM).sentences
    assert ("the port holds in head 1 the golden's head 3" in told) is is_told


# Right values in another order are told with the order; values that only resemble them are not.
WIDTH = HEADS * HEAD_DIM
BEGINNING = "the port holds the right values in another order: "
Order = Callable[[torch.Tensor], torch.Tensor]


def told(
    golden: torch.Tensor, port: torch.Tensor, places: torch.Tensor, head_dim: int | None = None
) -> str | None:
    massive = torch.zeros(golden.shape[1], dtype=torch.bool)
    return describe_order(Rows(reference=golden, target=port, massive=massive, places=places), head_dim)


def told_of(order: Order, head_dim: int | None) -> str | None:
    """Return the sentence of a port with the golden's values [B,S,F] in another order, each rounded anew."""
    generator = torch.Generator().manual_seed(0)
    golden = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    port = order(golden) * (1 + 0.004 * torch.randn(golden.shape, generator=generator))
    sides = (side.flatten(0, 1).bfloat16() for side in (golden, port))
    return told(*sides, right_rows().places, head_dim)


def heads(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(-1, (HEADS, HEAD_DIM))


def others(values: torch.Tensor) -> torch.Tensor:
    return torch.randn(values.shape, generator=torch.Generator().manual_seed(1))


ORDERS: dict[str, Order] = {
    "heads and tokens are not transposed": lambda v: heads(v).transpose(1, 2).reshape(v.shape),
    "heads and their dims are transposed": lambda v: heads(v).transpose(2, 3).flatten(2),
    "the dims of each head are reversed": lambda v: heads(v).flip(-1).flatten(2),
    "the halves of each head are exchanged": lambda v: heads(v).roll(HEAD_DIM // 2, -1).flatten(2),
    "the tokens of each row are reversed": lambda v: v.flip(1),
    "each token holds the values of the one earlier": lambda v: v.roll(1, 1),
    "channels lie in reverse order": lambda v: v.flip(-1),
    "channels lie with their halves exchanged": lambda v: v.roll(WIDTH // 2, -1),
    "channels lie rolled by 3: the first is 3": lambda v: v.roll(-3, -1),
}
IN_NO_ORDER: dict[str, Order] = {
    "right values": lambda v: v,
    "a scale": lambda v: 1.5 * v,
    "zeros": torch.zeros_like,
    "other values of the same distribution": others,
    "half of the channels": lambda v: torch.cat(
        (v[..., : WIDTH // 2].flip(-1), 2 * v[..., WIDTH // 2 :]), -1
    ),
    "the same for every token": lambda v: v[:, :1].expand_as(v),
}


def test_order_is_told_of_right_values_alone() -> None:
    for words, order in ORDERS.items():
        head_dim = None if words.startswith("channels") else HEAD_DIM
        assert told_of(order, head_dim) == f"{BEGINNING}{words}"
    for name, order in IN_NO_ORDER.items():
        assert told_of(order, HEAD_DIM) is told_of(order, None) is None, name
    # Heads that change places have words of their own.
    assert told_of(lambda v: heads(v).roll(1, 2).flatten(2), HEAD_DIM) is None


def few_tokens(number: int, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of a single row of tokens, and their places."""
    values = torch.randn(number, width, generator=torch.Generator().manual_seed(0))
    return values, torch.stack((torch.zeros(number), torch.arange(number)), dim=1).long()


@pytest.mark.parametrize(("number", "is_told"), [(15, False), (16, True)])
def test_few_tokens_tell_no_order(number: int, is_told: bool) -> None:
    golden, places = few_tokens(number)
    assert (told(golden, golden.flip(1), places) is not None) is is_told


def test_each_token_may_hold_the_values_of_a_later_one() -> None:
    golden, places = few_tokens(20)
    sentence = f"{BEGINNING}each token holds the values of the one later"
    assert told(golden, golden.roll(-1, 0), places) == sentence
    # Of a row of one token, nothing is known; it does not matter.
    with_another = torch.cat((places, torch.tensor([[1, 0]])))
    values = torch.cat((golden, golden[:1] + 3.0))
    assert told(values, torch.cat((golden.roll(-1, 0), values[:1])), with_another) == sentence


def test_rows_that_lack_their_padding_are_not_looked_at_for_a_transpose() -> None:
    golden, places = few_tokens(20)
    full = golden.unflatten(1, (4, 2)).transpose(0, 1).reshape(20, 8)
    shorter, others = few_tokens(12)
    places = torch.cat((places, others + torch.tensor([1, 0])))
    sentence = told(torch.cat((golden, shorter)), torch.cat((full, shorter + 1.0)), places, 2)
    assert sentence == f"{BEGINNING}heads and tokens are not transposed"


def test_halves_of_a_head_of_an_odd_number_of_dims_are_none() -> None:
    golden, places = few_tokens(20, 6)
    sentence = told(golden, golden.unflatten(1, (2, 3)).roll(1, dims=-1).flatten(1), places, 3)
    assert sentence is not None
    assert "halves" not in sentence


@pytest.mark.parametrize(("factor", "is_told"), [(0.09, True), (0.11, False)])
def test_an_order_must_leave_less_than_a_tenth(factor: float, is_told: bool) -> None:
    golden, places = few_tokens(40, 64)
    reversed_dims = golden.unflatten(1, (-1, 8)).flip(-1).flatten(1)
    for port, head_dim in ((golden.flip(0), None), (golden.roll(5, 1), None), (reversed_dims, 8)):
        rest = torch.randn(golden.shape, generator=torch.Generator().manual_seed(5))
        rest *= factor * float((port - golden).norm() / rest.norm())
        assert (told(golden, port + rest, places, head_dim) is not None) is is_told


@pytest.mark.parametrize(("num_kept", "is_told"), [(4, True), (6, False)])
def test_a_twentieth_of_the_channels_may_be_as_good_as_constant(num_kept: int, is_told: bool) -> None:
    golden, places = few_tokens(40, 100)
    golden[:, :num_kept] *= 1e-4
    port = torch.cat((golden[:, :num_kept].flip(0), golden[:, num_kept:].roll(7, 1)), 1)
    assert (told(golden, port, places) is not None) is is_told


def test_channels_that_hold_one_twice_are_in_no_order() -> None:
    golden, places = few_tokens(40, 100)
    port = golden.roll(1, 1)
    port[:, 50] = port[:, 49]
    assert told(golden, port, places) is None


def test_heads_that_change_places_and_their_dims_too_are_told() -> None:
    golden, places = few_tokens(40, 64)
    sentence = told(golden, golden.roll(5, 1), places, 8)
    assert sentence is not None
    assert "rolled by 5" in sentence
    # Each head holds another's channels, but not all of one.
    swapped = list(range(64))
    swapped[3], swapped[11] = 11, 3
    assert told(golden, golden[:, swapped], places, 8) is not None
