"""PromptJudge: the next-token distributions of a prompt, judged token by token, prefill apart from decode.

The golden is the exact model; its variants, which round as right ports do through all layers, give each token's noise.
t judged tokens, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from compare.prompts.noise_level import (
    NoiseLevel,
    distance_noise,
    logit_distance,
    rounding_noise,
    token_noise,
)
from compare.prompts.prompt_limits import PromptLimits
from minimax_tools.golden_logits.golden_logits import GoldenLogits
from minimax_tools.golden_logits.token_logits import TokenLogits, divergence
from minimax_tools.results.prompt_results import DifferingChoice, PhaseResult, PhaseShare, PromptResult
from minimax_tools.text.answered_prompts import AnsweredPrompt

# Least noise to divide by.
_TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortLogits:
    """A port's next-token logits of some tokens of a row, at the golden's candidates."""

    tokens: torch.Tensor  # indices of the tokens in the row, int64 [t], ascending
    logits: TokenLogits


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptJudge:
    """Judges prompts; `level` is the noise pooled over all of them."""

    level: NoiseLevel
    limits: PromptLimits = field(default_factory=PromptLimits)

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
        tokens = port.tokens[chosen]
        part = golden.select(tokens)
        logits = port.logits.select(chosen)
        divergences = divergence(part.exact, logits)
        noises = token_noise(part)
        excesses = divergences / (noises + self.limits.pooled * self.level.divergence + _TINY)
        # NaN breaks every limit.
        is_beyond = ~(excesses <= self.limits.excess * self._widening)
        choices = self._differing_choices(part, logits, tokens)
        return PhaseResult(
            tokens=tuple(tokens.tolist()),
            divergences=tuple(map(_finite, divergences.tolist())),
            noises=tuple(noises.tolist()),
            excesses=tuple(map(_finite, excesses.tolist())),
            beyond=tuple(tokens[is_beyond].tolist()),
            share_outside=float((~(divergences <= noises)).double().mean()),
            share_outside_rounding=float((~(divergences <= rounding_noise(part))).double().mean()),
            share_limit=self.limits.limit_alone(len(tokens)),
            first_choice=choices[0] if choices else None,
            worst_choice=max(choices, key=lambda choice: choice.excess, default=None),
            num_choices=len(choices),
        )

    def _differing_choices(
        self, golden: GoldenLogits, port: TokenLogits, tokens: torch.Tensor
    ) -> list[DifferingChoice]:
        """List the tokens after which the port's likeliest token is another, beyond noise."""
        is_candidate = golden.candidates == port.choices[:, None]
        # A token that is no candidate is at least as far as the last one.
        last = torch.full_like(port.choices, golden.candidates.shape[1] - 1)
        places = torch.where(is_candidate.any(dim=-1), is_candidate.long().argmax(dim=-1), last)
        margins = logit_distance(golden.exact.candidates, places)
        pooled = self.limits.pooled_distance * self.level.distance
        reaches = self.limits.choice * self._widening * (distance_noise(golden, places) + pooled)
        differs = (golden.candidates[:, 0] != port.choices) & ((margins > reaches) | (port.choices < 0))
        return [
            DifferingChoice(
                token=int(tokens[place]),
                golden=int(golden.candidates[place, 0]),
                port=int(port.choices[place]),
                margin=float(margins[place]) if port.choices[place] >= 0 else None,
                reach=float(reaches[place]),
            )
            for place in differs.nonzero().flatten().tolist()
        ]


def _sum_likelihood(logits: TokenLogits) -> float | None:
    """Return the summed log-probability of the tokens that follow; None if there are none, or it is not finite."""
    if not logits.num_tokens:
        return None
    return _finite(float(logits.following_log_probability().sum()))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
