"""LogitsVerdict: whether a port's next-token logits of some rows are those of a right port, in one value.

The rows are judged one by one, and then all together. T tokens of a row, t of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compare.prompts.prompt_judge import GoldenSource, NoiseLevel, PortLogits, PromptJudge
from minimax_tools.golden_logits.golden_rows import GoldenRows
from minimax_tools.results.prompt_results import PhaseResult, PhaseShare, PromptResult
from minimax_tools.text.answered_prompts import AnsweredPrompt, split_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsVerdict:
    """The judgement of all rows."""

    excess: float  # the largest error in units of its limit; infinite where logits are not finite
    first_pass: int | None  # first pass that differs (0: the prefill, t: the t-th step); None if none does
    reason: str  # what differs; empty if nothing does
    num_flipped: int = 0  # tokens that are near another right model than the exact one
    num_choices: int = 0  # tokens whose likeliest next token is another, beyond noise
    # Divergence in nats that noise makes: mean and 95th percentile over the tokens; None if it was not computed
    noise: tuple[float, float] | None = None

    @property
    def is_right(self) -> bool:
        """True if nothing differs beyond the noise of right models."""
        return self.first_pass is None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLogits:
    """A port's next-token logits of some tokens of a row."""

    tokens: torch.Tensor  # indices in the row, int64 [t], ascending
    logits: torch.Tensor  # [t,V]


def judge_rows(
    rows: Sequence[Sequence[int]],
    logits: Sequence[RowLogits],
    source: GoldenRows,
    *,
    num_decoded: int,
    through: str,
) -> LogitsVerdict:
    """Judge the logits of rows of token ids, and compute golden logits that `source` lacks.

    `num_decoded` tokens of each row were decoded; `through` is that of `judge_logits`.
    """
    prompts = split_rows(rows, num_decoded=num_decoded)
    source.make([prompt.row for prompt in prompts])
    ports = [
        PortLogits(tokens=row.tokens, logits=source.read(prompt.row).measure(row.logits, row.tokens))
        for row, prompt in zip(logits, prompts, strict=True)
    ]
    return judge_logits(prompts, ports, source, through=through)


def judge_logits(
    prompts: Sequence[AnsweredPrompt],
    ports: Sequence[PortLogits],
    source: GoldenSource,
    *,
    through: str,
) -> LogitsVerdict:
    """Judge the logits of rows; `through` names in words what right models pass, for the reason."""
    judge = PromptJudge(level=NoiseLevel.of(source.read(prompt.row) for prompt in prompts))
    results = judge.judge_all(prompts, ports, source)
    together = judge.judge_together(results)
    first_pass, reason = _find_fault(results, together, through=through)
    phases = [phase for result in results for phase in result.phases if phase.tokens]
    token_limit = judge.limits.excess * judge.limits.widening(judge.level.num_tokens)
    excesses = [
        *(_excess(phase, token_limit=token_limit) for phase in phases),
        *(share.share / share.limit for share in together),
    ]
    return LogitsVerdict(
        excess=max(excesses),
        first_pass=first_pass,
        reason=reason,
        num_flipped=sum(result.num_flipped for result in results),
        num_choices=sum(phase.num_choices for phase in phases),
        noise=_summarise(phases),
    )


def _summarise(phases: Sequence[PhaseResult]) -> tuple[float, float]:
    noises = torch.tensor([noise for phase in phases for noise in phase.noises], dtype=torch.float64)
    return float(noises.mean()), float(noises.quantile(0.95))


def _excess(phase: PhaseResult, *, token_limit: float) -> float:
    of_choice = 0.0 if phase.worst_choice is None else phase.worst_choice.excess
    return max(phase.worst_excess / token_limit, phase.share_outside / phase.share_limit, of_choice)


def _find_fault(
    results: Sequence[PromptResult], together: Sequence[PhaseShare], *, through: str
) -> tuple[int | None, str]:
    """Return the first pass that differs beyond noise, and what differs; None and nothing if none does."""
    beyond = [result for result in results if result.is_beyond]
    if beyond:
        first = min(beyond, key=_first_pass)
        return _first_pass(first), _word(first, through=through)
    for share in together:
        if share.is_beyond:
            return 0 if share.phase == "prefill" else 1, (
                f"{100 * share.share:.0f} % of the tokens of the {share.phase} are farther from the exact model than "
                f"right models that round, limit {100 * share.limit:.0f} %"
            )
    return None, ""


def _first_pass(result: PromptResult) -> int:
    """Return the first pass of a row that differs beyond noise."""
    if result.first is not None:
        return result.step_of(result.first)
    return 0 if result.prefill.is_beyond else 1


def _word(result: PromptResult, *, through: str) -> str:
    phase = result.prefill if result.prefill.is_beyond else result.phases[-1]
    if phase.first_choice is not None:
        choice = phase.first_choice
        return (
            f"row {result.number}, token {choice.token}: the likeliest next token is {choice.port}, the golden's is "
            f"{choice.golden}, beyond the noise of right models through {through}"
        )
    token = phase.tokens[phase.worst]
    return (
        f"row {result.number}, token {token}: the next tokens diverge by {phase.worst_excess:.3g}× what right models "
        f"do through {through}"
    )
