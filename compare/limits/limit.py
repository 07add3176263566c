"""Limit of a figure, by the number of tokens that it averages and the allowed share of false alarms.

A figure of few tokens strays further than one of many, and the worst of a thousand figures further than a single one.
So a limit is a rule: `usual` times the factor of chance at the allowed share.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from scipy.special import bdtrc, ndtri

# Smaller shares, and 0 above all, count as this one: limits stay finite.
_SMALLEST_SHARE = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit on a figure whose logarithm is about normally distributed.

    Args:
        usual: Usual figure of the right implementation that is furthest off.
        spread: Standard deviation of the figure's logarithm with many tokens.
        token_spread: Standard deviation that chance adds with one token; with T tokens it adds 1/√T of it.

    Raises:
        ValueError: `usual` is not above 0, a spread is below 0, or a value is not finite.
    """

    usual: float
    spread: float = 0.0
    token_spread: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.usual) and self.usual > 0.0):
            raise ValueError(f"usual must be above 0, found {self.usual:g}")
        for name in ("spread", "token_spread"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} must be at least 0, found {value:g}")

    def at(self, *, num_tokens: int, share: float) -> float:
        """Compute the limit that a figure over `num_tokens` of a right port exceeds in a `share` of the cases."""
        deviation = self.spread + self.token_spread / math.sqrt(max(num_tokens, 1))
        return self.usual * math.exp(max(quantile(share), 0.0) * deviation)

    def scaled(self, factor: float) -> Limit:
        """Return this limit times a factor above 0."""
        return replace(self, usual=self.usual * factor)


def quantile(share: float) -> float:
    """Return the value that a standard normal variable exceeds in a `share` of the cases; at least 0."""
    return -float(ndtri(min(max(share, _SMALLEST_SHARE), 0.5)))


def most_hits(num_trials: int, *, chance: float, share: float) -> int:
    """Return the number of hits that is exceeded in at most a `share` of the cases.

    Args:
        num_trials: Independent trials.
        chance: Probability that one trial hits; 1 and above is certain.
        share: Allowed probability of more hits, below 1.
    """
    return bisect_left(
        range(num_trials), True, key=lambda hits: bool(bdtrc(hits, num_trials, min(chance, 1.0)) <= share)
    )
