"""Generated tokens: the first one in which a port differs from the golden, and whether noise explains it.

Behind that token the two sides continue different texts, so nothing is compared there. Noise explains a token whose
logit is below that of the golden's token by no more than the reach of noise: `REACH` standard deviations of a right
port's logits. A greedy port's token must also be the likeliest by the port's own logits, if the run holds them.
T real tokens of the prompts, B prompts, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from compare.judging.logits import REACH
from compare.limits.criteria import Judgement
from minimax_tools.capture.generation import Continuation, Generation, Likely
from minimax_tools.results.results import GeneratedRow, SiteStatus

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
