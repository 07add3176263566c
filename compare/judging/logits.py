"""Logits: how far the port's next-token distributions are from the golden's, and whether noise explains it.

A token's distributions are compared whole (Kullback-Leibler divergence, in nats) and by their likeliest tokens. Noise
adds an error of standard deviation σ to each logit, on either side:

- the divergence that noise foretells is about σ²
- the distance between two logits is off by 2 σ

T judged tokens, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from compare.judging.noise_judge import judge_broken
from compare.limits.criteria import Judgement
from compare.limits.limit_context import LimitContext
from compare.limits.limits import NoiseLimits
from compare.noise.rho import foreseen_error
from compare.noise.rows import Rows
from compare.noise.squared_errors import TINY, square_rows
from minimax_tools.results.choices import LogitsResult, TokenChoice
from minimax_tools.results.results import SiteStatus

# Overlap is measured among so many likeliest tokens of both sides.
TOP = (1, 5, 10)
# In units of σ: the largest distance of two logits that noise may turn round. It is usually off by 2 σ; four times that
# does not happen in thousands of tokens.
REACH = 8.0
# Tokens compared at once, in float64.
_BLOCK_TOKENS = 16
# Differing choices that a result describes.
_MOST_NAMED = 5


def logit_noise(rows: Rows, *, usual_error: float) -> torch.Tensor:
    """Return σ, the standard deviation of a right port's logits from exact ones, for each token [T].

    If the golden kept no floor, `usual_error` of right ports counts, relative to the logits.
    """
    root_of_vocabulary = math.sqrt(rows.reference.shape[-1])
    if rows.has_floor:
        # `whole` is the sum of squares over the vocabulary.
        return foreseen_error(rows).whole.sqrt() / root_of_vocabulary
    relative = torch.full((rows.num_tokens,), usual_error, dtype=torch.float64)
    if rows.input_error is not None:
        relative = torch.hypot(relative, rows.input_error.inherited)
    return relative * square_rows(rows.reference, massive=rows.massive).whole.sqrt() / root_of_vocabulary


def compare_logits(rows: Rows, *, usual_error: float) -> LogitsResult:
    """Compare logits [T,V], finite on both sides, in float64; for `usual_error` see `logit_noise`."""
    divergence, overlap, golden, port, margin = (
        torch.cat(blocks) for blocks in zip(*_blocks(rows.reference, rows.target), strict=True)
    )
    noise = logit_noise(rows, usual_error=usual_error)
    foreseen = foreseen_divergence(rows, noise)
    disagrees = golden != port
    explained = disagrees & (margin <= REACH * noise)
    unexplained = (disagrees & ~explained).nonzero()[:, 0]
    unexplained = unexplained[margin[unexplained].argsort(descending=True, stable=True)]
    worst = int(divergence.argmax())
    row, position = rows.places[worst].tolist()
    return LogitsResult(
        num_tokens=rows.num_tokens,
        kl_mean=float(divergence.mean()),
        kl_p95=float(torch.quantile(divergence, 0.95)),
        kl_worst=float(divergence[worst]),
        worst_token=(row, position),
        kl_mean_foreseen=float(foreseen.mean()),
        kl_p95_foreseen=float(torch.quantile(foreseen, 0.95)),
        overlaps=dict(zip(TOP, overlap.mean(dim=0).tolist(), strict=True)),
        num_disagreeing=int(disagrees.sum()),
        num_explained=int(explained.sum()),
        worst_choices=tuple(
            TokenChoice(
                row=int(rows.places[token, 0]),
                position=int(rows.places[token, 1]),
                reference=int(golden[token]),
                target=int(port[token]),
                margin=float(margin[token]),
                reach=REACH * float(noise[token]),
            )
            for token in unexplained[:_MOST_NAMED].tolist()
        ),
    )


def foreseen_divergence(rows: Rows, noise: torch.Tensor) -> torch.Tensor:
    """Return the divergence that noise foretells for each token, [T].

    The noise σ is that of the average logit. Large logits are rounded to larger steps, and it is they that decide the
    distribution. So if the golden's own divergence from its float32 twin, twice (its rounding and the port's), is more
    than σ², all tokens' divergence is that many times larger.
    """
    foreseen = noise.square()
    if rows.twin is None:
        return foreseen
    measured = divergences(rows.twin, rows.reference)
    growth = 2.0 * float(measured.mean()) / max(float(foreseen.mean()), TINY)
    return foreseen * max(growth, 1.0)


def divergences(golden: torch.Tensor, port: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of the port's distribution from the golden's, in nats: float64 [T]."""
    return torch.cat([divergence for divergence, *_ in _blocks(golden, port)])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Limits on next-token distributions of right ports.

    Args:
        kl: Limit on the divergence's mean and 95th percentile, in units of the divergence that noise foretells. Right
            ports reach 1; with errors inherited from 3 to 6 layers 0.4 (mean) and 0.7 (95th percentile).
        fewest: Tokens from which `kl` holds; with fewer (a dump may hold each prompt's last token alone), the limit
            grows with √(fewest / tokens). The divergence of one token exceeds 4 by chance once in 200 prompts, and 16
            never.
        unexplained: Allowed number of tokens whose likeliest next token differs beyond the reach of noise. A right port
            has none: the reach is four standard deviations.
    """

    kl: float = 4.0
    fewest: int = 16
    unexplained: int = 0

    def kl_of(self, num_tokens: int) -> float:
        """Return the limit on the divergence over `num_tokens` tokens."""
        return self.kl * math.sqrt(max(self.fewest / max(num_tokens, 1), 1.0))


def judge_logits(
    logits: LogitsResult, limits: TokenLimits, *, noise: NoiseLimits, context: LimitContext
) -> Judgement:
    """Judge next-token distributions; `noise` knows the backends of limits, and the slack of other backends.

    A limit broken by more than the slack is broken on any backend (`is_anywhere`), and so is that on likeliest tokens.
    """
    faults = []
    if logits.num_unexplained > limits.unexplained:
        worst = logits.worst_choices[0]
        faults.append(
            f"{logits.num_unexplained} of {logits.num_tokens} likeliest tokens are others beyond noise, the worst at "
            f"row {worst.row}, token {worst.position}: {worst.target} for {worst.reference}, {worst.margin:.3g} "
            f"below it where noise reaches {worst.reach:.3g}"
        )
    is_anywhere = bool(faults)
    limit = limits.kl_of(logits.num_tokens)
    for figure, measured, foreseen in (
        ("mean", logits.kl_mean, logits.kl_mean_foreseen),
        ("95th percentile", logits.kl_p95, logits.kl_p95_foreseen),
    ):
        if not measured <= limit * foreseen:
            faults.append(
                f"{figure} of the divergence is {measured:.3g} nats, noise comes to {foreseen:.3g}, limit {limit:.3g}×"
            )
            # A divergence grows with the square of the error.
            is_anywhere |= not measured <= noise.slack**2 * limit * foreseen
    if not faults:
        return SiteStatus.PASS, ""
    return judge_broken("; ".join(faults), noise, context=context, is_anywhere=is_anywhere)


def _blocks(reference: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield of each block of t tokens: divergence [t], overlaps at the `TOP` [t,3], both choices [t], margin [t].

    The margin is the golden's logit of its own choice minus that of the port's choice.
    """
    for start in range(0, reference.shape[0], _BLOCK_TOKENS):
        golden, port = (side[start : start + _BLOCK_TOKENS].double() for side in (reference, target))
        log_golden, log_port = golden.log_softmax(dim=-1), port.log_softmax(dim=-1)
        divergence = (log_golden.exp() * (log_golden - log_port)).sum(dim=-1).clamp(min=0.0)
        size = min(max(TOP), golden.shape[-1])
        top_golden, top_port = (side.topk(size, dim=-1).indices for side in (golden, port))
        # A greedy choice takes the first of equal logits; topk does not promise to.
        golden_choice, port_choice = (side.argmax(dim=-1, keepdim=True) for side in (golden, port))
        margin = golden.gather(-1, golden_choice) - golden.gather(-1, port_choice)
        overlaps = [
            _overlap(golden_choice, port_choice) if k == 1 else _overlap(top_golden[:, :k], top_port[:, :k])
            for k in TOP
        ]
        yield divergence, torch.stack(overlaps, dim=-1), golden_choice[:, 0], port_choice[:, 0], margin[:, 0]


def _overlap(golden: torch.Tensor, port: torch.Tensor) -> torch.Tensor:
    """Return the share of the tokens [t,k] that both sides have, [t]."""
    shared = (golden[:, :, None] == port[:, None, :]).any(dim=-1)
    return shared.double().mean(dim=-1)
