"""Choices that a port makes otherwise than the golden: experts, and next tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A token that the port sends to other experts."""

    row: int  # the token's prompt
    position: int  # index of the token in its row, padding included
    dropped: tuple[int, ...]  # experts that the golden chose and the port did not
    # Experts that the port chose and the golden did not; none if the port names one twice.
    chosen: tuple[int, ...]
    # Difference of biased scores that noise must overcome to cause the flip; None without a floor.
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
    # The widest margin of an unexplained flip; None without a noise floor.
    widest_unexplained_margin: float | None
    worst_flips: tuple[Flip, ...] = ()  # some unexplained flips, the widest margin first

    @property
    def num_unexplained(self) -> int:
        """Flips that noise does not explain."""
        return self.num_flipped - self.num_explained


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """A place where the port's likeliest next token is not the golden's."""

    row: int  # the prompt
    position: int  # index of the token in its row, padding included
    reference: int  # the golden's likeliest token
    target: int  # the port's likeliest token
    margin: float  # the golden's logit of its own token minus its logit of the port's token
    reach: float  # the largest margin that noise may reverse


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsResult:
    """Comparison of the next-token distributions, token by token."""

    num_tokens: int  # judged tokens
    # KL(golden ‖ port) in nats over the tokens: mean, 95th percentile, worst.
    kl_mean: float
    kl_p95: float
    kl_worst: float
    worst_token: tuple[int, int]  # row, and index in it, of the token with `kl_worst`
    # `kl_mean` and `kl_p95` as noise of the floor's size alone would make them.
    kl_mean_foreseen: float
    kl_p95_foreseen: float
    # By k, the share of the golden's k likeliest tokens that are among the port's k likeliest.
    overlaps: Mapping[int, float]
    num_disagreeing: int  # tokens whose likeliest next token is another
    num_explained: int  # disagreements whose margin noise may reverse
    worst_choices: tuple[TokenChoice, ...] = ()  # some unexplained disagreements, the widest margin first
    # Whether the golden's head was given the port's own last layer: then no layer's error is in these figures.
    is_of_head: bool = False

    @property
    def num_unexplained(self) -> int:
        """Disagreements that noise does not explain."""
        return self.num_disagreeing - self.num_explained


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLogits:
    """Next-token distributions of a run or of one pass of it, against the golden's own."""

    # 0 for a whole port's prefill, t for its t-th step; None for all tokens of a run of layers.
    number: int | None
    num_tokens: int
    kl_mean: float  # Kullback-Leibler divergence in nats
    kl_worst: float
    worst_token: tuple[int, int]  # row and index of the token
    num_agreeing: int  # tokens whose likeliest next token is the golden's
