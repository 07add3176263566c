"""Generated tokens: where a port first goes on otherwise than the golden, and whether noise explains it.

Behind the first token that differs both sides go on from other texts: nothing is compared there. A greedy port's token
must also be the likeliest by the port's own logits, where the run holds these.
T real tokens of the prompts, B prompts, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from compare.judging.logits import REACH
from minimax_tools.capture.generation import Continuation, Generation, Likely
from minimax_tools.results.results import GeneratedRow, SiteStatus

# The few tokens that noise sends to other experts suffer far more; a wrong port must not hide behind them.
_NOISE_QUANTILE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstLogits:
    """Logits behind each prompt, from which the first token is chosen.

    Args:
        reference: The golden's, [B,V].
        target: The port's, [B,V].
    """

    reference: torch.Tensor
    target: torch.Tensor


def compare_generated(
    reference: Generation,
    target: Generation,
    *,
    noise: torch.Tensor | None,
    places: torch.Tensor | None,
    first: FirstLogits | None = None,
) -> tuple[GeneratedRow, ...]:
    """Compare what both sides generated, row by row.

    Args:
        reference: The golden's.
        target: The port's, of the same prompts.
        noise: [T], by which a right port's logits may be off on the prompts; None where nothing tells.
        places: [T,2], row and position of each of them.
        first: The logits behind the prompts; None where a side does not hold them.
    """
    is_drawn = bool(reference.sampling.get("do_sample"))
    is_greedy = not target.sampling.get("do_sample")
    found = []
    for row, (golden, port, num_alike) in enumerate(
        zip(reference.rows, target.rows, target.num_alike(reference), strict=True)
    ):
        reach = _reach(row, noise, places)
        if first is not None:
            golden, port = _with_first(golden, first.reference[row]), _with_first(port, first.target[row])
        compared = _compare_row(row, golden, port, num_alike, reach=reach, is_drawn=is_drawn)
        found.append(_judge_by_port_logits(compared, golden, port, reach=reach) if is_greedy else compared)
    return tuple(found)


def _with_first(row: Continuation, logits: torch.Tensor) -> Continuation:
    """Add the first token's alternatives to a row that kept none, by the logits [V] behind the prompt."""
    if (row.likeliest and row.likeliest[0]) or not row.generated_ids:
        return row
    values, tokens = logits.float().sort(descending=True)
    behind = (values[0] - values).tolist()
    kept = tuple(Likely(token=token, behind=far) for token, far in zip(tokens.tolist(), behind, strict=True))
    return replace(row, likeliest=(kept, *row.likeliest[1:]))


def _judge_by_port_logits(
    result: GeneratedRow, golden: Continuation, port: Continuation, *, reach: float | None
) -> GeneratedRow:
    """Fail a row with a token that the port's own logits do not choose, by more than noise."""
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
    """Return the margin that noise may turn round behind a prompt, from what nearly all its tokens suffer."""
    if noise is None or places is None:
        return None
    return REACH * float(torch.quantile(noise[places[:, 0] == row], _NOISE_QUANTILE))


def _compare_row(
    row: int,
    golden: Continuation,
    port: Continuation,
    num_alike: int,
    *,
    reach: float | None,
    is_drawn: bool,
) -> GeneratedRow:
    num_compared = min(len(golden.generated_ids), len(port.generated_ids))
    alike = GeneratedRow(
        row=row,
        num_compared=num_compared,
        num_alike=num_alike,
        status=SiteStatus.NOT_JUDGED if is_drawn or not num_compared else SiteStatus.PASS,
        reason="the golden drew its tokens" if is_drawn else "",
    )
    if num_alike == num_compared:
        return alike
    wanted, found = golden.generated_ids[num_alike], port.generated_ids[num_alike]
    margin, is_kept = _margin(golden, num_alike, found)
    if is_drawn or margin is None or reach is None:
        status = SiteStatus.NOT_JUDGED
        reason = (
            "the golden drew its tokens" if is_drawn else "the golden does not tell how close the choice was"
        )
    elif margin > reach:
        status = SiteStatus.FAIL
        reason = f"{'' if is_kept else 'more than '}{margin:.3g} below the golden's token, noise reaches {reach:.3g}"
    elif is_kept:
        status = SiteStatus.PASS
        reason = f"{margin:.3g} below the golden's token, noise reaches {reach:.3g}"
    else:
        status = SiteStatus.NOT_JUDGED
        reason = (
            f"the golden kept only tokens less than {margin:.3g} below its own, noise reaches {reach:.3g}"
        )
    return replace(
        alike, status=status, reason=reason, reference=wanted, target=found, margin=margin, reach=reach
    )


def _margin(golden: Continuation, index: int, token: int) -> tuple[float | None, bool]:
    """Return how far a token's logit was below the golden's choice, and whether the golden kept that token."""
    if index >= len(golden.likeliest) or not golden.likeliest[index]:
        return None, False
    for one in golden.likeliest[index]:
        if one.token == token:
            return one.behind, True
    return golden.likeliest[index][-1].behind, False
