"""Reordering: a site's right values in another order, such as a missing transpose or reversed channels.

An order is told only if the golden in that order explains the port's values, and as they are they do not.
T judged tokens, F channels, D channels of a head, S tokens of a row without padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from compare.noise.rows import Rows
from compare.noise.squared_errors import TINY_FLOAT32
from reports.order_words import word_order

# Share of the error that an order may leave. Right values in their order leave the noise, which is below a hundredth;
# neighbouring tokens of a stream are alike, and leave more than half.
_MOST_LEFT = 0.1
# Two channels, or tokens, hold the same values if their cosine similarity is above this.
_SAME = 0.98
# Share of the channels that must be found elsewhere: a few may be as good as constant.
_LEAST_FOUND = 0.95
# With fewer tokens, channels resemble each other by chance. With more channels the matrix of all pairs is too large.
_FEWEST_TOKENS, _MOST_CHANNELS = 16, 8192


def describe_order(rows: Rows, head_dim: int | None, channel_word: str = "channel") -> str | None:
    """Describe the order in which a site holds the golden's values; None if it is the right one, or not known.

    `head_dim` is D if the channels are heads side by side; else None. `channel_word` is the noun for one channel.
    """
    golden, port = rows.reference.float(), rows.target.float()
    error = float((port - golden).norm())
    if rows.num_tokens < _FEWEST_TOKENS or error <= TINY_FLOAT32:
        return None
    for words, order in _plain_orders(golden, rows.places, head_dim):
        is_known = order.isfinite().all(dim=1)
        # An order of some rows must explain these.
        left, before = float((port - order)[is_known].norm()), float((port - golden)[is_known].norm())
        if before > _MOST_LEFT * error and left <= _MOST_LEFT * before:
            return f"the port holds the right values in another order: {words}"
    channels = _match_channels(golden, port)
    if channels is None or (head_dim is not None and _moves_heads(channels, head_dim)):
        return None
    if float((port - golden[:, channels]).norm()) > _MOST_LEFT * error:
        return None
    return (
        f"the port holds the right values in another order: {word_order(channels, noun=f'{channel_word}s')}"
    )


def _plain_orders(
    golden: torch.Tensor, places: torch.Tensor, head_dim: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield orders in words with the golden's values [T,F] in that order; NaN in tokens whose values are not known."""
    width = golden.shape[1]
    if head_dim is not None and width % head_dim == 0 and width > head_dim:
        yield "heads and tokens are not transposed", _not_transposed(golden, places, head_dim)
        heads = golden.unflatten(1, (-1, head_dim))
        yield "heads and their dims are transposed", heads.transpose(1, 2).flatten(1)
        yield "the dims of each head are reversed", heads.flip(-1).flatten(1)
        if head_dim % 2 == 0:
            yield "the halves of each head are exchanged", heads.roll(head_dim // 2, dims=-1).flatten(1)
    yield "the tokens of each row are reversed", _by_row(golden, places, shift=None)
    for shift in (1, -1):
        towards = "later" if shift > 0 else "earlier"
        yield f"each token holds the values of the one {towards}", _by_row(golden, places, shift=shift)


def _not_transposed(golden: torch.Tensor, places: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows of full length as [heads, S, D] read as [S, heads, D]; other rows lack their padding."""
    order = torch.full_like(golden, torch.nan)
    length = int(places[:, 1].max()) + 1
    for row in places[:, 0].unique().tolist():
        tokens = (places[:, 0] == row).nonzero().flatten()
        if len(tokens) == length:
            heads = golden[tokens].unflatten(1, (-1, head_dim)).transpose(0, 1)
            order[tokens] = heads.reshape(length, -1)
    return order


def _by_row(golden: torch.Tensor, places: torch.Tensor, *, shift: int | None) -> torch.Tensor:
    """Return the tokens of each row reversed, or those `shift` later; NaN beyond the row's ends."""
    order = torch.full_like(golden, torch.nan)
    for row in places[:, 0].unique().tolist():
        tokens = (places[:, 0] == row).nonzero().flatten()
        if shift is None:
            order[tokens] = golden[tokens.flip(0)]
        elif len(tokens) > abs(shift):
            here, there = (
                (tokens[:-shift], tokens[shift:]) if shift > 0 else (tokens[-shift:], tokens[:shift])
            )
            order[here] = golden[there]
    return order


def _match_channels(golden: torch.Tensor, port: torch.Tensor) -> list[int] | None:
    """Return the golden's channel that each channel of the port holds; None if too many hold none, or one twice."""
    if golden.shape[1] > _MOST_CHANNELS:
        return None
    one, other = (torch.nn.functional.normalize(side, dim=0) for side in (port, golden))
    likeness, origins = (one.T @ other).max(dim=1)
    is_found = likeness > _SAME
    origins = torch.where(is_found, origins, torch.arange(len(origins)))
    is_order = len(origins.unique()) == len(origins)
    if not is_order or float(is_found.float().mean()) < _LEAST_FOUND:
        return None
    channels: list[int] = origins.tolist()
    return channels if channels != sorted(channels) else None


def _moves_heads(channels: list[int], head_dim: int) -> bool:
    """Decide whether whole heads have changed places, which has words of its own."""
    heads = torch.tensor(channels).unflatten(0, (-1, head_dim))
    return bool(
        (heads - heads[:, :1] == torch.arange(head_dim)).all() and (heads[:, 0] % head_dim == 0).all()
    )
