"""Limit: how far a figure of a port that is right may go, by how much was averaged and how much is judged.

A figure of few tokens strays further than one of many, and the worst of a thousand figures further than one. So a
limit is no number but a rule: `usual` times what chance adds, at the share of false alarms that is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

_STANDARD = NormalDist()
# Below this the tail of the normal distribution is not resolved.
_SMALLEST_SHARE = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit on a figure whose logarithm strays about normally.

    Args:
        usual: What the implementation that is furthest off usually comes to.
        spread: Standard deviation of the figure's logarithm, however many tokens it is of.
        token_spread: That which chance adds over one token; over T tokens 1/√T of it.

    Raises:
        ValueError: `usual` is not above 0, or a spread is below 0, or one of them is not finite.
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
        """Return the limit of a figure over `num_tokens`, which a right port passes but for a `share` of the cases."""
        deviation = self.spread + self.token_spread / math.sqrt(max(num_tokens, 1))
        return self.usual * math.exp(max(quantile(share), 0.0) * deviation)

    def scaled(self, factor: float) -> Limit:
        """Return this limit times a factor above 0."""
        return replace(self, usual=self.usual * factor)


def quantile(share: float) -> float:
    """Return what a standard normal value exceeds in a `share` of the cases."""
    return -_STANDARD.inv_cdf(min(max(share, _SMALLEST_SHARE), 0.5))


def most_hits(num_trials: int, *, chance: float, share: float) -> int:
    """Return the most hits of so many trials, each by `chance`, but for a `share` of the cases."""
    if chance >= 1.0 or num_trials == 0:
        return num_trials
    odds = math.log(chance) - math.log1p(-chance) if chance > 0.0 else -math.inf
    probability = num_trials * math.log1p(-chance)
    remaining = 1.0 - math.exp(probability)
    hits = 0
    while remaining > share and hits < num_trials:
        probability += math.log((num_trials - hits) / (hits + 1)) + odds
        hits += 1
        remaining -= math.exp(probability)
    return hits
