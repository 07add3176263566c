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
        share_alone: Share of a prompt's tokens at which a right port may be farther from the golden than every variant.
        share_together: The same over all prompts, of the two variants that only round: a right port is like a third.
        share_deviations: Deviations of either share that are allowed, for the number of tokens.
        tokens_apart: Number of a prompt's tokens that vary apart, where all prompts are judged together.
    """

    excess: float = 5.0
    choice: float = 3.0
    pooled: float = 0.5
    pooled_distance: float = 1.0
    usual_tokens: int = 5000
    share_alone: float = 0.25
    share_together: float = 1 / 3
    share_deviations: float = 4.0
    tokens_apart: int = 4

    def widening(self, num_tokens: int) -> float:
        """Return the factor on the limits of single tokens, for a list of so many."""
        return math.sqrt(math.sqrt(max(num_tokens / self.usual_tokens, 1.0)))

    def limit_alone(self, num_tokens: int) -> float:
        """Return the limit on the share of one phase of one prompt; above 1, none can break it."""
        return self._share_limit(self.share_alone, num_tokens)

    def limit_together(self, num_tokens: int, *, num_prompts: int) -> float:
        """Return the limit on the share of one phase of all prompts; above 1, none can break it."""
        return self._share_limit(self.share_together, min(num_tokens, self.tokens_apart * num_prompts))

    def _share_limit(self, usual: float, num_tokens: int) -> float:
        return usual + self.share_deviations * math.sqrt(usual * (1 - usual) / max(num_tokens, 1))
