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
        usual_share: Share of tokens at which a right port is farther from the golden than two variants that only round.
        share_deviations: Deviations of that share that are allowed, over all prompts of a list.
        tokens_apart: Number of a prompt's tokens that vary apart, where all prompts are judged together.
        share_alone: Limit on that share in one phase of one prompt: its tokens vary together.
        fewest_alone: Tokens below which such a phase is not judged by its share.
    """

    excess: float = 5.0
    choice: float = 3.0
    pooled: float = 0.5
    pooled_distance: float = 1.0
    usual_tokens: int = 5000
    usual_share: float = 1 / 3
    share_deviations: float = 4.0
    tokens_apart: int = 4
    share_alone: float = 0.9
    fewest_alone: int = 8

    def widening(self, num_tokens: int) -> float:
        """Return the factor on the limits of single tokens, for a list of so many."""
        return math.sqrt(math.sqrt(max(num_tokens / self.usual_tokens, 1.0)))

    def share_of(self, num_tokens: int) -> float:
        """Return the limit on the share of one phase of one prompt; above 1, none can break it."""
        return self.share_alone if num_tokens >= self.fewest_alone else 2.0

    def share_together(self, num_tokens: int, *, num_prompts: int) -> float:
        """Return the limit on the share of one phase of all prompts; above 1, none can break it."""
        num_apart = max(min(num_tokens, self.tokens_apart * num_prompts), 1)
        return self.usual_share + self.share_deviations * math.sqrt(
            self.usual_share * (1 - self.usual_share) / num_apart
        )
