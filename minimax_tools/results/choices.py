"""Choices that a port makes otherwise than the golden: experts, and next tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A token that the port sends to other experts.

    Args:
        row: The token's prompt.
        position: The token's position in its row.
        dropped: Experts that the golden chose and the port did not.
        chosen: Experts that the port chose and the golden did not; none if the port names one expert twice.
        margin: Difference of biased scores that noise must overcome to cause the flip; None without a floor.
    """

    row: int
    position: int
    dropped: tuple[int, ...]
    chosen: tuple[int, ...]
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingResult:
    """Comparison of the chosen experts, token by token.

    A flip is explained if noise may reverse its margin. The margin is the distance between the k-th and the (k+1)-th
    score; if the weights are known, the distance between the experts that changed places.
    """

    num_tokens: int  # judged tokens
    num_flipped: int  # judged tokens with other experts
    num_explained: int  # flips that noise explains
    widest_unexplained_margin: float | None  # the widest margin of an unexplained flip; None without a floor
    worst_flips: tuple[Flip, ...] = ()  # some unexplained flips, the widest margin first

    @property
    def num_unexplained(self) -> int:
        """Flips that noise does not explain."""
        return self.num_flipped - self.num_explained


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """A place where the port's likeliest next token is not the golden's."""

    row: int  # the prompt
    position: int  # the position in the row
    reference: int  # the golden's likeliest token
    target: int  # the port's likeliest token
    margin: float  # the golden's logit of its own token minus its logit of the port's token
    reach: float  # the largest margin that noise may reverse


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsResult:
    """Comparison of the next-token distributions, token by token.

    Args:
        num_tokens: Judged tokens.
        kl_mean, kl_p95, kl_worst: KL(golden ‖ port) in nats over the tokens: mean, 95th percentile, worst.
        worst_token: Row and position of the worst token.
        kl_mean_foreseen, kl_p95_foreseen: The divergence that noise within the floor causes.
        overlaps: By k, the share of the golden's k likeliest tokens that are among the port's k likeliest.
        num_disagreeing: Tokens whose likeliest next token is another.
        num_explained: Disagreements whose margin noise may reverse.
        worst_choices: Some unexplained disagreements, the widest margin first.
    """

    num_tokens: int
    kl_mean: float
    kl_p95: float
    kl_worst: float
    worst_token: tuple[int, int]
    kl_mean_foreseen: float
    kl_p95_foreseen: float
    overlaps: Mapping[int, float]
    num_disagreeing: int
    num_explained: int
    worst_choices: tuple[TokenChoice, ...] = ()

    @property
    def num_unexplained(self) -> int:
        """Other choices that noise does not explain."""
        return self.num_disagreeing - self.num_explained
