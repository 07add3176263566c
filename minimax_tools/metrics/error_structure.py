"""Structure: ρ of averages of an error, in which rounding cancels and a systematic mistake does not.

Rounding errors nearly cancel when averaged over a token's channels, or over a channel's tokens. A wrong scale, an
offset or a few wrong channels remain, even where they are smaller than the noise itself.
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
    """Averages of the target's error over those of the golden's; 1 is as good as the golden.

    Args:
        token_gain: Ratio of the gains of the tokens: the part of the error along the value, over ordinary channels.
        channel_gain: Ratio of the gains of the channels: the part of the error along the value, over tokens.
        channel_offset: Ratio of the sums of the errors of the channels over tokens.
        channel_worst: Ratio of the errors of the worst channel over all tokens.
        worst_channel: Index of the worst channel.
    """

    token_gain: float
    channel_gain: float
    channel_offset: float
    channel_worst: float
    worst_channel: int

    def divided(self, divisors: Sequence[float]) -> Structure:
        """Divide each of `figures` by its divisor."""
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
        """Gains of tokens and of channels, offset of channels, and error of the worst channel."""
        return self.token_gain, self.channel_gain, self.channel_offset, self.channel_worst


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Averages:
    """Averages of one side's error, float64: gains per token [T], and gains, offsets and squares per channel [F]."""

    token_gains: torch.Tensor
    channel_gains: torch.Tensor
    channel_offsets: torch.Tensor
    channel_squares: torch.Tensor


def measure_structure(
    twin: torch.Tensor, reference: torch.Tensor, target: torch.Tensor, *, massive: torch.Tensor
) -> Structure | None:
    """Measure the structure of a target's error; None where the golden has no error to compare with.

    Args:
        twin: float32 [T,F], the exact values.
        reference: [T,F], the golden.
        target: [T,F], the port.
        massive: bool [F], massive channels; they would hide the others in the gain of a token.
    """
    golden = _average(reference, twin, massive)
    port = _average(target, twin, massive)
    floor = golden.channel_squares
    if not float(floor.sum()) > 0.0:
        return None
    # A channel without noise is compared with the median channel.
    ratios = port.channel_squares / floor.clamp(min=max(float(floor.median()), _TINY))
    worst = int(ratios.argmax())
    return Structure(
        token_gain=_ratio(port.token_gains, golden.token_gains),
        channel_gain=_ratio(port.channel_gains, golden.channel_gains),
        channel_offset=_ratio(port.channel_offsets, golden.channel_offsets),
        channel_worst=math.sqrt(float(ratios[worst])),
        worst_channel=worst,
    )


def _average(rows: torch.Tensor, twin: torch.Tensor, massive: torch.Tensor) -> _Averages:
    """Average block by block of rows: float32 suffices for an error of few digits, sums over blocks are float64."""
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
