"""PromptJudge: the next-token distributions of a prompt, judged token by token, prefill apart from decode.

The golden is the exact model; its variants, which round as right ports do, give each token's noise, and pooled over all
tokens that of tokens at which no variant flips an expert. If few tokens of a prompt are beyond noise, alternatives are
computed, which flip experts where scores are almost equal, and it is judged again. t judged tokens, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from minimax_tools.golden_logits.golden_logits import GoldenLogits, TokenLogits, divergence
from minimax_tools.json_codec import finite_or_none
from minimax_tools.reference.rounded_model import FLIP_SHARES
from minimax_tools.results.prompt_results import DifferingChoice, PhaseResult, PhaseShare, PromptResult
from minimax_tools.text.answered_prompts import AnsweredPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseLevel:
    """Usual noise of a right port."""

    num_tokens: int  # pooled tokens
    # 95th percentile over tokens of the farthest variant's divergence from the exact model, in nats
    divergence: float
    # Mean over tokens of the variants' largest error in the distance of the two likeliest tokens' logits
    distance: float

    @classmethod
    def of(cls, goldens: Iterable[GoldenLogits]) -> NoiseLevel:
        """Pool the noise of rows; there is at least one."""
        divergences, distances = [], []
        for golden in goldens:
            divergences.append(token_noise(golden))
            first = torch.zeros(golden.num_tokens, dtype=torch.int64)
            distances.append(distance_noise(golden, first, first + min(1, golden.candidates.shape[1] - 1)))
        pooled = torch.cat(divergences)
        return cls(
            num_tokens=len(pooled),
            divergence=float(pooled.quantile(0.95)),
            distance=float(torch.cat(distances).mean()),
        )


def token_noise(golden: GoldenLogits) -> torch.Tensor:
    """Return the farthest variant's divergence from the exact model, in nats, for each token: float64 [T]."""
    return torch.stack([divergence(golden.exact, variant) for variant in golden.variants]).amax(dim=0)


def rounding_noise(golden: GoldenLogits) -> torch.Tensor:
    """Return the same of the variants that make no flips but their own, float64 [T].

    They are samples of right ports: one more right port is farther than all of them at a share of the tokens.
    """
    own = golden.variants[: len(golden.variants) - len(FLIP_SHARES)]
    return torch.stack([divergence(golden.exact, variant) for variant in own]).amax(dim=0)


def logit_distance(logits: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the logit of the candidate in one place [T] minus that in another, of logits [T,K]: float64 [T]."""
    places = torch.stack((one, other), dim=-1)
    higher, lower = logits.double().gather(-1, places).unbind(dim=-1)
    return higher - lower


def distance_noise(golden: GoldenLogits, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the largest error of the variants in such a distance, for each token: float64 [T]."""
    exact = logit_distance(golden.exact.candidates, one, other)
    errors = [logit_distance(variant.candidates, one, other) - exact for variant in golden.variants]
    return torch.stack(errors).abs().amax(dim=0)


# Least noise to divide by.
_TINY = 1e-12
# Alternatives are not computed if more than this share of the prompts, and more than so many, need them: of right ports
# one row in a hundred does.
_MOST_DOUBTFUL_SHARE, _MOST_DOUBTFUL = 0.1, 8
# Prompts whose alternatives are in memory at a time, 0.5 GB.
_TOGETHER = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortLogits:
    """A port's next-token logits of some tokens of a row, at the golden's candidates."""

    tokens: torch.Tensor  # indices of the tokens in the row, int64 [t], ascending
    logits: TokenLogits


class GoldenSource(Protocol):
    """A source of golden logits, by their rows."""

    def read(self, row: Sequence[int]) -> GoldenLogits:
        """Return the golden logits of a row."""

    def find_alternatives(self, goldens: Sequence[GoldenLogits]) -> list[GoldenLogits]:
        """Return golden logits with those of further right models."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJudge:
    """Judges prompts; `level` is the noise pooled over all of them."""

    level: NoiseLevel
    limits: PromptLimits = field(default_factory=PromptLimits)

    def judge_all(
        self, prompts: Sequence[AnsweredPrompt], ports: Sequence[PortLogits], source: GoldenSource
    ) -> list[PromptResult]:
        """Judge all prompts, and once more with alternatives those that a few flips may explain."""
        results = [
            self.judge(number, prompt, source.read(prompt.row), port)
            for number, (prompt, port) in enumerate(zip(prompts, ports, strict=True))
        ]
        doubtful = [result.number for result in results if result.may_be_flips]
        if len(doubtful) > max(_MOST_DOUBTFUL_SHARE * len(results), _MOST_DOUBTFUL):
            return results
        for start in range(0, len(doubtful), _TOGETHER):
            numbers = doubtful[start : start + _TOGETHER]
            goldens = [source.read(prompts[number].row) for number in numbers]
            for number, golden in zip(numbers, source.find_alternatives(goldens), strict=True):
                results[number] = self.judge(number, prompts[number], golden, ports[number])
        return results

    def judge(
        self, number: int, prompt: AnsweredPrompt, golden: GoldenLogits, port: PortLogits
    ) -> PromptResult:
        """Judge one prompt, by its number in the list."""
        is_prefilled = port.tokens < len(prompt.prompt_ids)
        has_decoded = bool(prompt.answer_ids)
        # The last prefilled token predicts the answer's first; its last token predicts what follows.
        predicting = port.tokens >= len(prompt.prompt_ids) - 1
        predicting &= port.tokens < golden.num_tokens - 1
        return PromptResult(
            number=number,
            name=prompt.name,
            prompt=prompt.prompt,
            answer=prompt.answer,
            target=prompt.target,
            is_right=prompt.is_right,
            num_prompt_tokens=len(prompt.prompt_ids),
            num_decoded=len(prompt.answer_ids),
            num_cut=prompt.num_cut,
            prefill=self._judge_phase(golden, port, is_prefilled),
            decode=self._judge_phase(golden, port, ~is_prefilled) if has_decoded else None,
            golden_log_likelihood=_sum_likelihood(golden.exact.select(port.tokens[predicting])),
            port_log_likelihood=_sum_likelihood(port.logits.select(predicting)),
            recorded_log_likelihood=prompt.log_likelihood,
        )

    @property
    def _widening(self) -> float:
        return self.limits.widening(self.level.num_tokens)

    def judge_together(self, results: Sequence[PromptResult]) -> tuple[PhaseShare, ...]:
        """Judge each phase over all prompts: by the share of its tokens that are farther than variants that round."""
        prefills = [result.prefill for result in results]
        decodes = [result.decode for result in results if result.decode is not None]
        shares = []
        for name, phases in (("prefill", prefills), ("decode", decodes)):
            num_tokens = sum(len(phase.tokens) for phase in phases)
            if num_tokens:
                num_outside = sum(phase.share_outside_rounding * len(phase.tokens) for phase in phases)
                shares.append(
                    PhaseShare(
                        phase=name,
                        num_tokens=num_tokens,
                        share=num_outside / num_tokens,
                        limit=self.limits.limit_together(num_tokens, num_prompts=len(phases)),
                    )
                )
        return tuple(shares)

    def _judge_phase(self, golden: GoldenLogits, port: PortLogits, chosen: torch.Tensor) -> PhaseResult:
        """Judge the tokens of a phase, chosen by a bool [t] out of the port's."""
        part = golden.select(port.tokens[chosen])
        logits = port.logits.select(chosen)
        tokens = port.tokens[chosen]
        noises = token_noise(part)
        from_exact = divergence(part.exact, logits)
        nearest = part.nearest(logits)
        divergences = divergence(nearest, logits)
        excesses = self._excesses(divergences, noises)
        is_beyond = self._are_beyond(excesses)
        choices = self._differing_choices(part, nearest, logits, tokens)
        of_exact = self._differing_choices(part, part.exact, logits, tokens)
        beyond_exact = tokens[self._are_beyond(self._excesses(from_exact, noises))].tolist()
        found = {*tokens[is_beyond].tolist(), *(choice.token for choice in choices)}
        return PhaseResult(
            tokens=tuple(tokens.tolist()),
            divergences=tuple(map(finite_or_none, divergences.tolist())),
            noises=tuple(noises.tolist()),
            excesses=tuple(map(finite_or_none, excesses.tolist())),
            beyond=tuple(tokens[is_beyond].tolist()),
            flipped=tuple(sorted({*beyond_exact, *(choice.token for choice in of_exact)} - found)),
            share_outside=float((~(from_exact <= noises)).double().mean()),
            share_outside_rounding=float((~(from_exact <= rounding_noise(part))).double().mean()),
            share_limit=self.limits.limit_alone(len(tokens)),
            first_choice=choices[0] if choices else None,
            worst_choice=max(choices, key=lambda choice: choice.excess, default=None),
            num_choices=len(choices),
        )

    def _excesses(self, divergences: torch.Tensor, noises: torch.Tensor) -> torch.Tensor:
        return divergences / (noises + self.limits.pooled * self.level.divergence + _TINY)

    def _are_beyond(self, excesses: torch.Tensor) -> torch.Tensor:
        # NaN breaks every limit.
        return ~(excesses <= self.limits.excess * self._widening)

    def _differing_choices(
        self, golden: GoldenLogits, model: TokenLogits, port: TokenLogits, tokens: torch.Tensor
    ) -> list[DifferingChoice]:
        """List the tokens after which the port's likeliest token is not that of a right model, beyond noise."""
        own, others = (_places(golden.candidates, choices) for choices in (model.choices, port.choices))
        margins = logit_distance(model.candidates, own, others)
        pooled = self.limits.pooled_distance * self.level.distance
        reaches = self.limits.choice * self._widening * (distance_noise(golden, own, others) + pooled)
        differs = (model.choices != port.choices) & ((margins > reaches) | (port.choices < 0))
        return [
            DifferingChoice(
                token=int(tokens[place]),
                golden=int(model.choices[place]),
                port=int(port.choices[place]),
                margin=float(margins[place]) if port.choices[place] >= 0 else None,
                reach=float(reaches[place]),
            )
            for place in differs.nonzero().flatten().tolist()
        ]


def _places(candidates: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Return each choice's place among the candidates [T,K]; one that is none is at least as far as the last."""
    is_candidate = candidates == choices[:, None]
    last = candidates.shape[1] - 1
    return torch.where(is_candidate.any(dim=-1), is_candidate.long().argmax(dim=-1), last)


def _sum_likelihood(logits: TokenLogits) -> float | None:
    """Return the summed log-probability of the tokens that follow; None if there are none, or it is not finite."""
    if not logits.num_tokens:
        return None
    return finite_or_none(float(logits.following_log_probability().sum()))
