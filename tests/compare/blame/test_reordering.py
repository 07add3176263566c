"""Right values in another order are told with the order; values that only resemble them are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compare.blame.reordering import describe_order
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
