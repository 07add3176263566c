"""Structure: averages of an error, in which rounding cancels and a systematic mistake does not.

Rounding errors nearly cancel when averaged over a token's channels, or over a channel's tokens. A wrong scale, an
offset or a few wrong channels remain, even if they are smaller than the noise itself. A gain is the part of the error
that is proportional to the exact value: Σ error · exact / Σ exact².
Shapes: T judged tokens, F channels of a site.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

# Least divisor: keeps a channel of zeros from dividing by zero.
_TINY = 1e-30
# Tokens that are averaged at a time; bounds the float32 copies.
_BLOCK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Averages of the port's error, each divided by the same average of the golden's; 1 is as good as the golden."""

    token_gain: float  # L2 norm of the gains of the tokens, each over ordinary channels
    channel_gain: float  # L2 norm of the gains of the channels, each over all tokens
    channel_offset: float  # L2 norm of the errors of the channels, each summed over all tokens
    channel_worst: float  # L2 error of the worst channel over all tokens
    worst_channel: int  # index of the worst channel

    def divided(self, divisors: Sequence[float]) -> Structure:
        """Return the structure with each of its `figures` divided by its own divisor, such as a variant's figure."""
        token_gain, channel_gain, channel_offset, channel_worst = divisors
        return replace(
            self,
            token_gain=self.token_gain / token_gain,
            channel_gain=self.channel_gain / channel_gain,
            channel_offset=self.channel_offset / channel_offset,
            channel_worst=self.channel_worst / channel_worst,
        )

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """Gains of tokens and of channels, offset of channels, and error of the worst channel."""
        return self.token_gain, self.channel_gain, self.channel_offset, self.channel_worst


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Averages:
    """Averages of one side's error, float64."""

    token_gains: torch.Tensor  # [T]
    channel_gains: torch.Tensor  # [F]
    channel_offsets: torch.Tensor  # [F], sum of the errors over all tokens
    channel_squares: torch.Tensor  # [F], sum of the squared errors over all tokens


def measure_structure(
    twin: torch.Tensor, reference: torch.Tensor, target: torch.Tensor, *, massive: torch.Tensor
) -> Structure | None:
    """Measure the structure of a port's error; None if the golden has no error to compare with.

    Args:
        twin: float32 [T,F], values of the float32 twin, taken as exact.
        reference: Golden's values, any float dtype, [T,F].
        target: Port's values, any float dtype, [T,F].
        massive: bool [F], true on massive channels; in a token's gain they would hide the others.
    """
    golden = _average_error(reference, twin, massive)
    port = _average_error(target, twin, massive)
    golden_squares = golden.channel_squares
    # Not `<= 0`: the sum may be NaN.
    if not float(golden_squares.sum()) > 0.0:
        return None
    # A channel with less noise than the median channel is compared with the median channel.
    least_squares = max(float(golden_squares.median()), _TINY)
    ratios = port.channel_squares / golden_squares.clamp(min=least_squares)
    worst = int(ratios.argmax())
    return Structure(
        token_gain=_ratio(port.token_gains, golden.token_gains),
        channel_gain=_ratio(port.channel_gains, golden.channel_gains),
        channel_offset=_ratio(port.channel_offsets, golden.channel_offsets),
        channel_worst=math.sqrt(float(ratios[worst])),
        worst_channel=worst,
    )


def _average_error(values: torch.Tensor, twin: torch.Tensor, massive: torch.Tensor) -> _Averages:
    """Average the error of one side's values [T,F].

    Blocks are computed in float32, enough for errors of few digits, and summed in float64.
    """
    num_tokens, num_channels = values.shape
    ordinary = (~massive).to(torch.float32)
    gains = []
    products, exact_squares, sums, squares = torch.zeros(4, num_channels, dtype=torch.float64)
    for start in range(0, num_tokens, _BLOCK_TOKENS):
        exact = twin[start : start + _BLOCK_TOKENS].to(torch.float32)
        error = values[start : start + _BLOCK_TOKENS].to(torch.float32) - exact
        product, exact_square = error * exact, exact.square()
        gains.append((product @ ordinary) / (exact_square @ ordinary).clamp(min=_TINY))
        products += product.sum(dim=0)
        exact_squares += exact_square.sum(dim=0)
        sums += error.sum(dim=0)
        squares += error.square_().sum(dim=0)
    return _Averages(
        token_gains=torch.cat(gains).double(),
        channel_gains=products / exact_squares.clamp(min=_TINY),
        channel_offsets=sums,
        channel_squares=squares,
    )


def _ratio(port: torch.Tensor, golden: torch.Tensor) -> float:
    """Return the L2 norm of the port's averages over that of the golden's; 1 if both are 0."""
    numerator, denominator = float(port.norm()), float(golden.norm())
    if denominator == 0.0:
        return 1.0 if numerator == 0.0 else math.inf
    return numerator / denominator
