"""Limit: the value that a figure of a right port stays below, except in an allowed share of false alarms.

    limit = usual · exp(z · (spread + token_spread / √T))

T is the number of tokens judged: most figures are averages over them, and with few, chance moves these further. For the
worst token or channel T is the same, and the caller divides the share by their number. The two spreads are added, as
scripts/fit_limits.py fits them. z is the standard normal quantile of the allowed share: a comparison of many figures
allows each of them a smaller share, so its limits are wider.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from scipy.special import bdtrc, ndtri

# Smaller shares count as this one: a share of 0 would make a limit infinite.
_SMALLEST_SHARE = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit on a figure whose logarithm is about normally distributed among right ports.

    Raises:
        ValueError: `usual` is not above 0, a spread is below 0, or a value is not finite.
    """

    # Value that no limit falls below. As calibrated: mostly the median figure of the right implementation whose median
    # is largest; for the worst token or channel the golden's own error times a margin; for `flipped_share` a
    # probability, which `most_hits` gets.
    usual: float
    spread: float = 0.0  # at least the standard deviation of the figure's logarithm with many tokens
    token_spread: float = 0.0  # what chance adds to it with one token; T tokens: token_spread / √T

    def __post_init__(self) -> None:
        if not (math.isfinite(self.usual) and self.usual > 0.0):
            raise ValueError(f"usual must be above 0, found {self.usual:g}")
        for name in ("spread", "token_spread"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be at least 0, found {value:g}")

    def at(self, *, num_tokens: int, share: float) -> float:
        """Compute the limit that a right port's figure, of `num_tokens` judged, exceeds in a `share` of the cases."""
        deviation = self.spread + self.token_spread / math.sqrt(max(num_tokens, 1))
        return self.usual * math.exp(quantile(share) * deviation)

    def scaled(self, factor: float) -> Limit:
        """Return this limit times a factor above 0."""
        return replace(self, usual=self.usual * factor)


def quantile(share: float) -> float:
    """Return the value that a standard normal variable exceeds in a `share` of the cases; 0 for shares above 0.5."""
    return -float(ndtri(min(max(share, _SMALLEST_SHARE), 0.5)))


def most_hits(num_trials: int, *, chance: float, share: float) -> int:
    """Return the largest number of hits that chance explains: more occur in at most a `share` of the cases.

    The trials are independent, and each hits with probability `chance`. A `chance` above 1 counts as 1.
    """
    # bdtrc is the chance of more than `hits`, which falls with their number: bisection finds the first small enough.
    return bisect_left(
        range(num_trials), True, key=lambda hits: bool(bdtrc(hits, num_trials, min(chance, 1.0)) <= share)
    )
