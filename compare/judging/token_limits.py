"""Token limits: what logits and generated tokens must keep to, beside what ρ says of the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compare.judging.noise_judge import judge_broken
from compare.limits.criteria import Judgement
from compare.limits.limit_context import Terms
from compare.limits.limits import NoiseLimits
from minimax_tools.results.results import LogitsResult, SiteStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Limits on next-token distributions.

    Args:
        kl: Of the divergence's mean and 95th percentile, in units of what noise foretells. A divergence grows with
            the square of the error, so it is the square of ρ's limit; clean ports stay below 0.4 (mean) and 0.7
            (95th percentile) with errors handed on by 3 to 6 layers, and at 1 with none, as both sides err there.
        fewest: Tokens from which that holds. Of fewer, as where a dump holds each prompt's last token alone, the limit
            grows with the root of what is lacking: where two tokens share nearly all probability, the divergence of
            one is half a squared normal deviate, which exceeds 4 once in 200 prompts, and 16 never.
        unexplained: Places whose likeliest token is another although noise cannot have turned the margin round: a
            right port has none, since the reach lies four deviations out.
    """

    kl: float = 4.0
    fewest: int = 16
    unexplained: int = 0

    def kl_of(self, num_tokens: int) -> float:
        """Return the limit on a divergence of so many tokens."""
        return self.kl * math.sqrt(max(self.fewest / max(num_tokens, 1), 1.0))


def judge_logits(logits: LogitsResult, limits: TokenLimits, *, noise: NoiseLimits, terms: Terms) -> Judgement:
    """Judge next-token distributions.

    Args:
        logits: What they say.
        limits: What those of right ports stay below.
        noise: Where limits were measured, and how much further one must be broken elsewhere.
        terms: Where the port ran.
    """
    faults = []
    if logits.num_unexplained > limits.unexplained:
        worst = logits.worst_choices[0]
        faults.append(
            f"{logits.num_unexplained} of {logits.num_tokens} likeliest tokens are others beyond noise, the worst at "
            f"row {worst.row}, position {worst.position}: {worst.target} for {worst.reference}, {worst.margin:.3g} "
            f"below it where noise reaches {worst.reach:.3g}"
        )
    is_anywhere = bool(faults)
    limit = limits.kl_of(logits.num_tokens)
    for name, found, foreseen in (
        ("mean", logits.kl_mean, logits.kl_mean_foreseen),
        ("95th percentile", logits.kl_p95, logits.kl_p95_foreseen),
    ):
        if not found <= limit * foreseen:
            faults.append(
                f"{name} of the divergence is {found:.3g} nats, noise comes to {foreseen:.3g}, limit {limit:.3g}×"
            )
            # A divergence grows with the square of the error.
            is_anywhere |= not found <= noise.slack**2 * limit * foreseen
    if not faults:
        return SiteStatus.PASS, ""
    return judge_broken("; ".join(faults), noise, terms=terms, is_anywhere=is_anywhere)
