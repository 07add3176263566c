"""PromptLimits: limits on the next-token distributions of right ports, in units of their noise."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """Limits fitted on right ports of some models and tried on others (BENCHMARKS.md has the figures).

    Args:
        excess: Limit on a token's divergence, in units of its noise, for a list of `usual_tokens` or fewer.
        choice: Limit on the margin between the golden's likeliest token and the port's, in units of the noise of their
            distance, for such a list.
        pooled: Share of the pooled divergence that is added to a token's own noise, for flips that no variant shows.
        pooled_distance: Share of the pooled noise of distances that is added to a distance's own.
        usual_tokens: Tokens of a list beyond which the limits grow, with the fourth root of their number: the more
            tokens are judged, the farther the worst of a right port lies.
        usual_share: Share of tokens at which a right port is farther from the golden than every variant; a right port
            that rounds as much as they do has this share or less.
        share_deviations: Deviations of that share that are allowed, for the number of tokens.
    """

    excess: float = 3.0
    choice: float = 3.0
    pooled: float = 0.5
    pooled_distance: float = 1.0
    usual_tokens: int = 5000
    usual_share: float = 0.25
    share_deviations: float = 4.0

    def widening(self, num_tokens: int) -> float:
        """Return the factor on the limits of single tokens, for a list of so many."""
        return math.sqrt(math.sqrt(max(num_tokens / self.usual_tokens, 1.0)))

    def share_of(self, num_tokens: int) -> float:
        """Return the limit on the share of tokens that are farther than every variant; above 1, none can break it."""
        deviation = math.sqrt(self.usual_share * (1 - self.usual_share) / max(num_tokens, 1))
        return self.usual_share + self.share_deviations * deviation
