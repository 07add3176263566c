"""Structure: ρ of an error seen through averages that noise hardly survives and a systematic mistake does.

Rounding errors have no direction and no memory: averaged over a token's channels, or over a channel's tokens, they
all but cancel, on both sides alike. A wrong scale, an offset or a few wrong channels do not, although they may be
smaller than the noise itself.
Shapes: T judged tokens, F channels of a site.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

_TINY = 1e-30
_BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The target's averages over the golden's; 1 is as good as the golden.

    Args:
        token_gain: Of the scale of each token, which is all its ordinary channels' error along their value.
        channel_gain: Of the scale of each channel over the tokens.
        channel_offset: Of the mean error of each channel over the tokens.
        channel_worst: Error of the worst channel over all tokens.
        worst_channel: Which it is.
    """

    token_gain: float
    channel_gain: float
    channel_offset: float
    channel_worst: float
    worst_channel: int

    def divided(self, divisors: Sequence[float]) -> Structure:
        """The same, each of `figures` in a unit that is so many times as large."""
        token_gain, channel_gain, channel_offset, channel_worst = (
            figure / divisor for figure, divisor in zip(self.figures, divisors, strict=True)
        )
        return replace(
            self,
            token_gain=token_gain,
            channel_gain=channel_gain,
            channel_offset=channel_offset,
            channel_worst=channel_worst,
        )

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """The gains of tokens and of channels, the channels' offset, and the worst channel's error."""
        return self.token_gain, self.channel_gain, self.channel_offset, self.channel_worst


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Averages:
    """Of one side's error: gains per token [T], gains, offsets and squared errors per channel [F]; float64."""

    token_gains: torch.Tensor
    channel_gains: torch.Tensor
    channel_offsets: torch.Tensor
    channel_squares: torch.Tensor


def measure_structure(
    twin: torch.Tensor, reference: torch.Tensor, target: torch.Tensor, *, massive: torch.Tensor
) -> Structure | None:
    """The structure of a target's error; None where the golden has no error to hold it against.

    Args:
        twin: float32 [T,F], what both sides approximate.
        reference: [T,F], the golden.
        target: [T,F], the port.
        massive: bool [F], the massive channels; they would hide the others in a token's scale.
    """
    mine = _average(reference, twin, massive)
    theirs = _average(target, twin, massive)
    floor = mine.channel_squares
    if not float(floor.sum()) > 0.0:
        return None
    # A channel that happens to be free of noise is held against the median one.
    ratios = theirs.channel_squares / floor.clamp(min=max(float(floor.median()), _TINY))
    worst = int(ratios.argmax())
    return Structure(
        token_gain=_ratio(theirs.token_gains, mine.token_gains),
        channel_gain=_ratio(theirs.channel_gains, mine.channel_gains),
        channel_offset=_ratio(theirs.channel_offsets, mine.channel_offsets),
        channel_worst=math.sqrt(float(ratios[worst])),
        worst_channel=worst,
    )


def _average(rows: torch.Tensor, twin: torch.Tensor, massive: torch.Tensor) -> _Averages:
    """A block of rows at a time, in float32: an error has few digits; sums over blocks are float64."""
    num_channels = rows.shape[1]
    ordinary = (~massive).to(torch.float32)
    gains = []
    products, norms, sums, squares = torch.zeros(4, num_channels, dtype=torch.float64)
    for start in range(0, rows.shape[0], _BLOCK_ROWS):
        exact = twin[start : start + _BLOCK_ROWS].to(torch.float32)
        error = rows[start : start + _BLOCK_ROWS].to(torch.float32) - exact
        product, norm = error * exact, exact.square()
        gains.append((product @ ordinary) / (norm @ ordinary).clamp(min=_TINY))
        products += product.sum(dim=0)
        norms += norm.sum(dim=0)
        sums += error.sum(dim=0)
        squares += error.square_().sum(dim=0)
    return _Averages(
        token_gains=torch.cat(gains).double(),
        channel_gains=products / norms.clamp(min=_TINY),
        channel_offsets=sums,
        channel_squares=squares,
    )


def _ratio(target: torch.Tensor, reference: torch.Tensor) -> float:
    numerator, denominator = float(target.norm()), float(reference.norm())
    if denominator == 0.0:
        return 1.0 if numerator == 0.0 else math.inf
    return numerator / denominator
