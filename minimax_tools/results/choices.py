"""Choices that a port makes otherwise than the golden: experts, and next tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A token that the port sends to other experts.

    Args:
        dropped: Experts that the golden chose and the port did not.
        chosen: Experts that the port chose and the golden did not; none if it names one twice.
        margin: What noise must overcome, in biased scores; None without a floor.
    """

    row: int
    position: int
    dropped: tuple[int, ...]
    chosen: tuple[int, ...]
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingResult:
    """Expert sets, token by token.

    A flip is explained if noise may turn its margin round. The margin is the distance between the k-th and the
    (k+1)-th score, or, if the weights are known, between the experts that changed places.

    Args:
        num_tokens: Judged tokens.
        num_flipped: Of them, those with other experts.
        num_explained: Of these, those that the noise explains.
        widest_unexplained_margin: The widest margin of the others; None without a floor.
        worst_flips: Some of the others, the widest margin first.
    """

    num_tokens: int
    num_flipped: int
    num_explained: int
    widest_unexplained_margin: float | None
    worst_flips: tuple[Flip, ...] = ()

    @property
    def num_unexplained(self) -> int:
        """Flips that noise does not explain."""
        return self.num_flipped - self.num_explained


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """A place where the port's likeliest next token is not the golden's.

    Args:
        margin: How far the golden's logit of its own token is above that of the port's.
        reach: The margin that noise may turn round.
    """

    row: int
    position: int
    reference: int
    target: int
    margin: float
    reach: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsResult:
    """Next-token distributions, token by token; the golden's is what the port's diverges from.

    Args:
        num_tokens: Judged tokens.
        kl_mean, kl_p95, kl_worst: Kullback-Leibler divergence in nats: mean, 95th percentile, the worst token's.
        worst_token: That token's row and position.
        kl_mean_foreseen, kl_p95_foreseen: What noise within the floor comes to.
        overlaps: By k, the share of the golden's k likeliest tokens that are among the port's.
        num_disagreeing: Places whose likeliest token is another.
        num_explained: Of them, those whose margin noise may turn round.
        worst_choices: Some of the others, the widest margin first.
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
