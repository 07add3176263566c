"""Logits: how far next-token distributions and generated tokens are from the golden's, and whether noise explains it.

Noise adds an error of standard deviation σ to each logit, on either side. The Kullback-Leibler divergence that it
foretells is about σ² nats, and the distance between two logits is off by 2 σ; it explains a token whose logit is below
that of the golden's token by no more than `REACH` σ. Behind the first generated token that differs, nothing is
compared. A greedy port's token must also be the likeliest by its own logits. T judged tokens, B prompts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from compare.judging.judge import judge_broken
from compare.limits.criteria import Judgement
from compare.limits.limits import LimitContext, NoiseLimits
from compare.noise.rho import foreseen_error
from compare.noise.rows import TINY, Rows, square_rows
from minimax_tools.capture.passes import Continuation, Generation, Likely
from minimax_tools.results.results import GeneratedRow, LogitsResult, SiteStatus, TokenChoice

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


# Largest mean and 95th percentile of the divergence, in units of the divergence that noise foretells. Right ports reach
# 1; with errors inherited from 3 to 6 layers 0.4 (mean) and 0.7 (95th percentile).
_MOST_DIVERGENCE = 4.0
# With fewer tokens (a dump may hold each prompt's last token alone), the limit grows with √(fewest / tokens). The
# divergence of one token exceeds 4 by chance once in 200 prompts, and 16 never.
_FEWEST_TOKENS = 16


def divergence_limit(num_tokens: int) -> float:
    """Return the limit on the divergence over `num_tokens` tokens, in units of the one that noise foretells."""
    return _MOST_DIVERGENCE * math.sqrt(max(_FEWEST_TOKENS / max(num_tokens, 1), 1.0))


def judge_logits(logits: LogitsResult, *, noise: NoiseLimits, context: LimitContext) -> Judgement:
    """Judge next-token distributions; `noise` knows the backends of limits, and the slack of other backends.

    A right port has no likeliest token beyond the reach of noise, which is four standard deviations. Such a token is a
    fault on any backend (`is_anywhere`), and so is a divergence that breaks its limit by more than the slack.
    """
    faults = []
    if logits.num_unexplained:
        worst = logits.worst_choices[0]
        faults.append(
            f"{logits.num_unexplained} of {logits.num_tokens} likeliest tokens are others beyond noise, the worst at "
            f"row {worst.row}, token {worst.position}: {worst.target} for {worst.reference}, {worst.margin:.3g} "
            f"below it where noise reaches {worst.reach:.3g}"
        )
    is_anywhere = bool(faults)
    limit = divergence_limit(logits.num_tokens)
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


# A prompt's noise is this quantile over its tokens: a wrong port must not hide behind the few that flip.
_NOISE_QUANTILE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstLogits:
    """Logits behind each prompt, from which the first token is chosen."""

    reference: torch.Tensor  # the golden's logits, [B,V]
    target: torch.Tensor  # the port's logits, [B,V]


def compare_generated(
    reference: Generation,
    target: Generation,
    *,
    noise: torch.Tensor | None,
    places: torch.Tensor | None,
    first: FirstLogits | None = None,
) -> tuple[GeneratedRow, ...]:
    """Compare what both sides generated from the same prompts, row by row.

    `noise` [T] is the standard deviation of a right port's logits on the prompts, `places` [T,2] row and position of
    each of these tokens; None if they are not known. `first` is None if a side does not hold logits of the prompts.
    """
    is_drawn = bool(reference.sampling.get("do_sample"))
    is_greedy = not target.sampling.get("do_sample")
    results = []
    # `num_alike` counts the tokens of a row before the first that differs.
    for row, (golden, port, num_alike) in enumerate(
        zip(reference.rows, target.rows, target.num_alike(reference), strict=True)
    ):
        reach = _reach(row, noise, places)
        if first is not None:
            golden, port = _with_first(golden, first.reference[row]), _with_first(port, first.target[row])
        compared = _compare_row(row, golden, port, num_alike, reach=reach, is_drawn=is_drawn)
        results.append(_judge_by_port_logits(compared, golden, port, reach=reach) if is_greedy else compared)
    return tuple(results)


def _with_first(row: Continuation, logits: torch.Tensor) -> Continuation:
    """Add the first token's candidates, from the logits [V] behind the prompt, to a row that kept none.

    `likeliest` holds candidates for each generated token, best first; `behind` is how far a logit is below the best.
    """
    if (row.likeliest and row.likeliest[0]) or not row.generated_ids:
        return row
    values, tokens = logits.float().sort(descending=True)
    behind = (values[0] - values).tolist()
    kept = tuple(Likely(token=token, behind=far) for token, far in zip(tokens.tolist(), behind, strict=True))
    return replace(row, likeliest=(kept, *row.likeliest[1:]))


def _judge_by_port_logits(
    result: GeneratedRow, golden: Continuation, port: Continuation, *, reach: float | None
) -> GeneratedRow:
    """Fail a row with a token that is below the port's own likeliest one by more than noise."""
    if reach is None or result.status is SiteStatus.FAIL:
        return result
    for index in range(min(result.num_compared, len(port.likeliest))):
        token = port.generated_ids[index]
        margin, _ = _margin(port, index, token)
        if margin is not None and margin > reach:
            best = port.likeliest[index][0].token
            reason = f"{margin:.3g} below token {best} by the port's own logits, noise reaches {reach:.3g}"
            return replace(
                result,
                num_alike=min(index, result.num_alike),
                status=SiteStatus.FAIL,
                reason=reason,
                reference=golden.generated_ids[index],
                target=token,
                margin=margin,
                reach=reach,
            )
    return result


def _reach(row: int, noise: torch.Tensor | None, places: torch.Tensor | None) -> float | None:
    """Return the distance of two logits that noise may turn round behind a prompt; None if the noise is not known."""
    if noise is None or places is None:
        return None
    return REACH * float(torch.quantile(noise[places[:, 0] == row], _NOISE_QUANTILE))


def _compare_row(
    row: int, golden: Continuation, port: Continuation, num_alike: int, *, reach: float | None, is_drawn: bool
) -> GeneratedRow:
    """Judge the first token that differs by its distance in the golden; if the golden drew, nothing is judged."""
    num_compared = min(len(golden.generated_ids), len(port.generated_ids))
    unjudged = ""
    if is_drawn:
        unjudged = "the golden drew its tokens"
    elif not num_compared:
        unjudged = "no token was compared"
    alike = GeneratedRow(
        row=row,
        num_compared=num_compared,
        num_alike=num_alike,
        status=SiteStatus.NOT_JUDGED if unjudged else SiteStatus.PASS,
        reason=unjudged,
    )
    if num_alike == num_compared:
        return alike
    golden_token, port_token = golden.generated_ids[num_alike], port.generated_ids[num_alike]
    # The golden chose its likeliest token, unless it drew; then the margin does not judge.
    margin, is_kept = _margin(golden, num_alike, port_token)
    status, reason = (
        (alike.status, alike.reason) if is_drawn else _judge_margin(margin, reach, is_kept=is_kept)
    )
    return replace(
        alike,
        status=status,
        reason=reason,
        reference=golden_token,
        target=port_token,
        margin=margin,
        reach=reach,
    )


def _judge_margin(margin: float | None, reach: float | None, *, is_kept: bool) -> Judgement:
    """Judge a token by its margin below the golden's, which is a lower bound unless the golden kept the token."""
    if margin is None or reach is None:
        return SiteStatus.NOT_JUDGED, "the golden does not tell how close the choice was"
    below = f"{margin:.3g} below the golden's token, noise reaches {reach:.3g}"
    if margin > reach:
        return SiteStatus.FAIL, below if is_kept else f"more than {below}"
    if is_kept:
        return SiteStatus.PASS, below
    reason = f"the golden kept only tokens less than {margin:.3g} below its own, noise reaches {reach:.3g}"
    return SiteStatus.NOT_JUDGED, reason


def _margin(row: Continuation, index: int, token: int) -> tuple[float | None, bool]:
    """Return how far a token's logit was below the likeliest one's, and whether the row kept that token.

    Of a token that it did not keep, the distance is at least that of the last one kept; None if it kept none.
    """
    if index >= len(row.likeliest) or not row.likeliest[index]:
        return None, False
    for likely in row.likeliest[index]:
        if likely.token == token:
            return likely.behind, True
    return row.likeliest[index][-1].behind, False
