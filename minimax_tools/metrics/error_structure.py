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

from minimax_tools.metrics.error_sums import ErrorSums, sum_errors

# Least divisor: keeps a channel of zeros from dividing by zero.
_TINY = 1e-30


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
    return compare_sums(*sum_errors(reference, target, exact=twin, massive=massive))


def compare_sums(golden: ErrorSums, port: ErrorSums) -> Structure | None:
    """Return the structure of a port's error from the sums of both sides' errors; None if the golden has no error."""
    golden_squares = golden.channel_squares
    # Not `<= 0`: the sum may be NaN.
    if not float(golden_squares.sum()) > 0.0:
        return None
    # A channel with less noise than the median channel is compared with the median channel.
    least_squares = max(float(golden_squares.median()), _TINY)
    ratios = port.channel_squares / golden_squares.clamp(min=least_squares)
    worst = int(ratios.argmax())
    return Structure(
        token_gain=_ratio(_token_gains(port), _token_gains(golden)),
        channel_gain=_ratio(_channel_gains(port), _channel_gains(golden)),
        channel_offset=_ratio(port.channel_offsets, golden.channel_offsets),
        channel_worst=math.sqrt(float(ratios[worst])),
        worst_channel=worst,
    )


def _token_gains(sums: ErrorSums) -> torch.Tensor:
    return sums.products / sums.exact_squares.clamp(min=_TINY)


def _channel_gains(sums: ErrorSums) -> torch.Tensor:
    return sums.channel_products / sums.channel_exact_squares.clamp(min=_TINY)


def _ratio(port: torch.Tensor, golden: torch.Tensor) -> float:
    """Return the L2 norm of the port's averages over that of the golden's; 1 if both are 0."""
    numerator, denominator = float(port.norm()), float(golden.norm())
    if denominator == 0.0:
        return 1.0 if numerator == 0.0 else math.inf
    return numerator / denominator
