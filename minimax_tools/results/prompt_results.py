"""PromptRanking: prompts by how far a port's next-token distributions are from the golden's, the worst first.

A prompt has two phases: its prefill, and the decoding of its answer, whose tokens are fed one at a time.

Followed: what came of following the worst prompt to its golden and to the layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimax_tools.results.results import Untested, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The commands that led from the worst prompt to a layer, and the outcome of the last."""

    commands: tuple[str, ...]  # as typed in a shell
    exit_code: int | None  # of the last command; None if none ran, because the golden cannot be made here
    record: Mapping[str, Any] | None = None  # the report of `mm2-test model` as JSON; None if it gave none
    report_file: str = ""  # the file that keeps it
    errors: str = ""  # what the command wrote to stderr, if it could not judge


# Flips are rare: more than this share of a prompt's tokens, and more than so many, are beyond noise for another reason.
_MOST_FLIPPED_SHARE, _MOST_FLIPPED = 0.1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferingChoice:
    """A token after which the port's likeliest next token is not the golden's, beyond noise."""

    token: int  # index in the row: prompt, then answer
    golden: int  # the golden's likeliest next token
    port: int  # the port's; -1 if its logits hold NaN
    # The golden's logit of its own token minus that of the port's; None if the port's has none
    margin: float | None
    reach: float  # the largest margin that noise may reverse

    @property
    def excess(self) -> float:
        """The margin in units of the reach; infinite if the port's token has none."""
        return math.inf if self.margin is None or not self.reach else self.margin / self.reach


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """The comparison of one phase of one prompt."""

    tokens: tuple[int, ...]  # indices in the row of the tokens whose next-token distributions were compared
    # For each token KL(golden ‖ port) in nats, the golden being the nearest right model; that of the farthest variant
    # from the exact model; and the error in units of noise. None where the port's logits are not finite
    divergences: tuple[float | None, ...]
    noises: tuple[float, ...]
    excesses: tuple[float | None, ...]
    beyond: tuple[int, ...]  # tokens whose error is beyond noise by itself
    # Tokens that are beyond noise from the exact model, and within it from another right model
    flipped: tuple[int, ...]
    # Share of the tokens that are farther from the golden than every variant, and the limit on it; above 1: no limit
    share_outside: float
    share_limit: float
    share_outside_rounding: float  # the same, of variants that only round; over all prompts together
    first_choice: DifferingChoice | None  # first token whose likeliest next token differs beyond noise
    worst_choice: DifferingChoice | None  # the one of them that is farthest beyond noise
    num_choices: int  # number of such tokens

    @property
    def is_beyond(self) -> bool:
        """True if the phase differs beyond noise."""
        return bool(self.beyond) or self.num_choices > 0 or self.is_outside

    @property
    def is_outside(self) -> bool:
        """True if so many tokens differ a little that noise does not explain it."""
        return self.share_outside > self.share_limit

    @property
    def worst(self) -> int:
        """Place in `tokens` of the largest error in units of noise."""
        return max(range(len(self.tokens)), key=lambda place: _or_infinity(self.excesses[place]))

    @property
    def worst_excess(self) -> float:
        """The largest error in units of noise; infinite if logits are not finite."""
        return _or_infinity(self.excesses[self.worst])

    @property
    def first(self) -> int | None:
        """First token that differs beyond noise; None if none does by itself."""
        tokens = [*self.beyond, *([] if self.first_choice is None else [self.first_choice.token])]
        return min(tokens) if tokens else None

    @property
    def mean_divergence(self) -> float | None:
        """Mean of the divergences in nats; None if one is not finite."""
        known = [value for value in self.divergences if value is not None]
        return sum(known) / len(known) if len(known) == len(self.divergences) else None

    @property
    def mean_noise(self) -> float:
        """Mean of the divergences that noise alone makes, in nats."""
        return sum(self.noises) / len(self.noises)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """The comparison of one prompt."""

    number: int  # of the prompt in the list
    name: str
    prompt: str  # text of the prompt; empty if it is not known
    answer: str  # text of the answer; empty if there is none but the prompt's own end
    target: str  # the right answer; empty if it is not known
    is_right: bool | None  # whether the recorded answer was right; None if it is not known
    num_prompt_tokens: int  # tokens that were prefilled
    num_decoded: int
    num_cut: int  # tokens of the answer that were not decoded
    prefill: PhaseResult
    decode: PhaseResult | None  # None if nothing was decoded
    # Log-likelihood of the decoded tokens: the golden's, the port's (None if not finite), and as the file recorded it
    golden_log_likelihood: float | None
    port_log_likelihood: float | None
    recorded_log_likelihood: float | None

    @property
    def phases(self) -> tuple[PhaseResult, ...]:
        """The phases that were compared, in order."""
        return (self.prefill,) if self.decode is None else (self.prefill, self.decode)

    @property
    def is_beyond(self) -> bool:
        """True if the prompt differs beyond noise."""
        return any(phase.is_beyond for phase in self.phases)

    @property
    def may_be_flips(self) -> bool:
        """True if it differs in so few tokens that a right port may send them to other experts by noise."""
        if not self.is_beyond or any(phase.is_outside for phase in self.phases):
            return False
        num_beyond = sum(max(len(phase.beyond), phase.num_choices) for phase in self.phases)
        num_tokens = sum(len(phase.tokens) for phase in self.phases)
        return num_beyond <= max(_MOST_FLIPPED_SHARE * num_tokens, _MOST_FLIPPED)

    @property
    def excess(self) -> float:
        """The largest error in units of noise."""
        return max(phase.worst_excess for phase in self.phases)

    @property
    def num_flipped(self) -> int:
        """Number of tokens that are near another right model than the exact one."""
        return sum(len(phase.flipped) for phase in self.phases)

    @property
    def first(self) -> int | None:
        """First token that differs beyond noise by itself; None if none does."""
        firsts = [phase.first for phase in self.phases if phase.first is not None]
        return min(firsts) if firsts else None

    def step_of(self, token: int) -> int:
        """Return the pass that computes a token: 0 for the prefill, t for the t-th decoding step."""
        return max(token - self.num_prompt_tokens + 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseShare:
    """The share of a phase's tokens, over all prompts, that are farther from the golden than variants that round."""

    phase: str  # `prefill` or `decode`
    num_tokens: int
    share: float
    limit: float

    @property
    def is_beyond(self) -> bool:
        """True if so many tokens differ a little that noise does not explain it."""
        return self.share > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRanking:
    """A ranking of prompts, the worst first; those that differ beyond noise come before all others."""

    results: tuple[PromptResult, ...]
    num_known: int  # rows of tokens whose golden logits were kept from earlier runs
    golden_logits: str  # folder of the golden logits
    shares: tuple[PhaseShare, ...] = ()  # of the phases of all prompts together
    # The worst prompt once more, in a batch of its own; None if it ran so before, or none differs
    alone: PromptResult | None = None
    words: Mapping[int, str] = field(default_factory=dict)  # text of tokens that reports name, by id
    notes: tuple[str, ...] = ()  # what a reader must know beside the verdict
    untested: tuple[Untested, ...] = ()  # what was not looked at, whatever the verdict

    @property
    def differing(self) -> tuple[PromptResult, ...]:
        """The prompts that differ beyond noise."""
        return tuple(result for result in self.results if result.is_beyond)

    @property
    def is_beyond_together(self) -> bool:
        """True if the prompts differ beyond noise in the number of their tokens that differ a little."""
        return any(share.is_beyond for share in self.shares)

    @property
    def is_of_batch(self) -> bool:
        """True if the worst prompt is right alone: its mistake needs the other prompts of its batch."""
        return self.alone is not None and not self.alone.is_beyond

    @property
    def verdict(self) -> Verdict:
        """Fail if a prompt differs beyond noise, or a phase of all prompts together does."""
        return Verdict.FAIL if self.differing or self.is_beyond_together else Verdict.PASS


def word_flipped(num_tokens: int) -> str:
    """Tell in words of tokens that are near another right model than the exact one; empty if there are none."""
    if not num_tokens:
        return ""
    are = "1 token is" if num_tokens == 1 else f"{num_tokens} tokens are"
    return (
        f"{are} beyond noise from the exact model, and within it from a right model that chose other experts"
    )


def rank_prompts(
    results: list[PromptResult], *, num_known: int, golden_logits: str, shares: tuple[PhaseShare, ...] = ()
) -> PromptRanking:
    """Rank prompts: the farthest beyond noise first."""
    ranked = sorted(results, key=lambda result: (not result.is_beyond, -result.excess, result.number))
    return PromptRanking(
        results=tuple(ranked), num_known=num_known, golden_logits=golden_logits, shares=shares
    )


def _or_infinity(value: float | None) -> float:
    return float("inf") if value is None else value
