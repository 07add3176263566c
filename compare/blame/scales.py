"""Scales: a site that is right but for constant factors: one for all values, one for each head, channel or token.

T judged tokens, F channels of a site, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from compare.noise.rows import Rows
from compare.noise.squared_errors import TINY_FLOAT32
from reports.wording import word_figure

# With fewer tokens, a factor for each channel explains noise. With fewer channels, one for each token does.
_FEWEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Factors on the golden's values that leave no more than noise."""

    of: str  # what has a factor of its own: `head`, `channel`, `token`; empty for one factor
    factors: torch.Tensor  # float32, broadcasts with [T,F]

    def __str__(self) -> str:
        least, most = (float(factor) for factor in (self.factors.min(), self.factors.max()))
        if not self.of:
            return f"the port's values are {least:.4g} times the golden's"
        first, last = word_figure(least), word_figure(most)
        if first == last:
            return f"the port's values are about {first} times the golden's"
        return f"each {self.of} is a multiple of the golden's, {first} to {last} times"


def find_scale(
    rows: Rows, *, head_dim: int | None, is_right: Callable[[Rows], bool], channel_word: str = "channel"
) -> Scale | None:
    """Find the factors, as few as possible, without which the port's values are right; None if there are none.

    `head_dim` is D if the channels are heads side by side; else None. `channel_word` is the noun for one channel.
    """
    for scale in _scales(rows, head_dim, channel_word):
        is_usable = bool((scale.factors.isfinite() & (scale.factors.abs() > TINY_FLOAT32)).all())
        if is_usable and is_right(unscaled(rows, scale)):
            return scale
    return None


def unscaled(rows: Rows, scale: Scale) -> Rows:
    """Return the rows with the port's values divided by their factors."""
    # Not rounded: a second rounding would add as much noise as the first.
    return replace(rows, target=rows.target.float() / scale.factors, errors=None)


def _scales(rows: Rows, head_dim: int | None, channel_word: str) -> Iterator[Scale]:
    golden, port = rows.reference.float(), rows.target.float()
    num_tokens, num_channels = golden.shape
    yield Scale(of="", factors=_fit(golden, port, (0, 1)))
    if num_tokens >= _FEWEST:
        if head_dim is not None and num_channels % head_dim == 0:
            of_heads, of_port = (side.unflatten(1, (-1, head_dim)) for side in (golden, port))
            factors = _fit(of_heads, of_port, (0, 2))
            yield Scale(of="head", factors=factors.expand(1, -1, head_dim).flatten(1))
        yield Scale(of=channel_word, factors=_fit(golden, port, (0,)))
    if num_channels >= _FEWEST:
        yield Scale(of="token", factors=_fit(golden, port, (1,)))


def _fit(golden: torch.Tensor, port: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Fit factors on the golden's values by least squares over some dims, which are kept with a size of 1."""
    products = (port * golden).sum(dim=dims, keepdim=True)
    return products / golden.square().sum(dim=dims, keepdim=True).clamp(min=TINY_FLOAT32)
