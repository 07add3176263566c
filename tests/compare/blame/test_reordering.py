"""Right values in another order are told with the order; values that only resemble them are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compare.blame.sentences import describe_order
from compare.noise.rows import Rows

ROWS, LENGTH, HEAD_DIM, HEADS = 2, 40, 16, 4
WIDTH = HEADS * HEAD_DIM
BEGINNING = "the port holds the right values in another order: "
Order = Callable[[torch.Tensor], torch.Tensor]


def rows(order: Order, *, noise: float = 0.004) -> Rows:
    """A golden, and a port that holds its values [B,S,F] in another order, each with its own rounding."""
    generator = torch.Generator().manual_seed(0)
    twin = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    port = order(twin) * (1 + noise * torch.randn(twin.shape, generator=generator))
    return Rows(
        reference=twin.flatten(0, 1).bfloat16(),
        target=port.flatten(0, 1).bfloat16(),
        massive=torch.zeros(WIDTH, dtype=torch.bool),
        places=torch.ones(ROWS, LENGTH).nonzero(),
        twin=twin.flatten(0, 1),
    )


def heads(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(-1, (HEADS, HEAD_DIM))


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


@pytest.mark.parametrize("words", ORDERS)
def test_plain_order_is_told(words: str) -> None:
    head_dim = None if words.startswith("channels") else HEAD_DIM
    assert describe_order(rows(ORDERS[words]), head_dim) == f"{BEGINNING}{words}"


WRONG: dict[str, Order] = {
    "right values": lambda v: v,
    "a scale": lambda v: 1.5 * v,
    "zeros": torch.zeros_like,
    "other values of the same distribution": lambda v: torch.randn(
        v.shape, generator=torch.Generator().manual_seed(1)
    ),
    "half of the channels in another order": lambda v: torch.cat(
        (v[..., : WIDTH // 2].flip(-1), 2 * v[..., WIDTH // 2 :]), -1
    ),
    "the same for every token": lambda v: v[:, :1].expand_as(v),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("head_dim", [HEAD_DIM, None])
def test_other_values_are_in_no_order(name: str, head_dim: int | None) -> None:
    assert describe_order(rows(WRONG[name]), head_dim) is None


def test_heads_that_change_places_have_words_of_their_own() -> None:
    assert describe_order(rows(lambda v: heads(v).roll(1, 2).flatten(2)), HEAD_DIM) is None


def few_tokens(number: int, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of a single row of tokens, and their places."""
    values = torch.randn(number, width, generator=torch.Generator().manual_seed(0))
    return values, torch.stack((torch.zeros(number), torch.arange(number)), dim=1).long()


def told(
    golden: torch.Tensor, port: torch.Tensor, places: torch.Tensor, head_dim: int | None = None
) -> str | None:
    massive = torch.zeros(golden.shape[1], dtype=torch.bool)
    return describe_order(Rows(reference=golden, target=port, massive=massive, places=places), head_dim)


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
    port = torch.cat((full, shorter + 1.0))
    sentence = told(torch.cat((golden, shorter)), port, places, 2)
    assert sentence == f"{BEGINNING}heads and tokens are not transposed"


def test_halves_of_a_head_of_an_odd_number_of_dims_are_none() -> None:
    golden, places = few_tokens(20, 6)
    exchanged = golden.unflatten(1, (2, 3)).roll(1, dims=-1).flatten(1)
    sentence = told(golden, exchanged, places, 3)
    assert sentence is not None
    assert "halves" not in sentence


@pytest.mark.parametrize(("factor", "is_told"), [(0.09, True), (0.11, False)])
def test_an_order_must_leave_less_than_a_tenth(factor: float, is_told: bool) -> None:
    golden, places = few_tokens(40, 64)
    for port, head_dim in (
        (golden.flip(0), None),
        (golden.roll(5, 1), None),
        (golden.unflatten(1, (-1, 8)).flip(-1).flatten(1), 8),
    ):
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
    port = golden.roll(5, 1)
    sentence = told(golden, port, places, 8)
    assert sentence is not None
    assert "rolled by 5" in sentence
    # Each head holds another's channels, but not all of one.
    swapped = list(range(64))
    swapped[3], swapped[11] = 11, 3
    assert told(golden, golden[:, swapped], places, 8) is not None
