"""Generated tokens: where a port first goes on otherwise than the golden, and whether noise explains it.

Behind the first token that differs both sides go on from other texts: nothing is compared there.
T real tokens of the prompts.
"""

from __future__ import annotations

import torch

from compare.logits import REACH
from minimax_tools.capture.generation import Continuation, Generation
from minimax_tools.results import GeneratedRow, SiteStatus

# The few tokens that noise sends to other experts suffer far more; a wrong port must not hide behind them.
_NOISE_QUANTILE = 0.95


def compare_generated(
    reference: Generation, target: Generation, *, noise: torch.Tensor | None, places: torch.Tensor | None
) -> tuple[GeneratedRow, ...]:
    """Compare what both sides generated, row by row.

    Args:
        reference: The golden's.
        target: The port's, of the same prompts.
        noise: [T], by which a right port's logits may be off on the prompts; None where nothing tells.
        places: [T,2], row and position of each of them.
    """
    is_drawn = bool(reference.sampling.get("do_sample"))
    rows = zip(reference.rows, target.rows, target.num_alike(reference), strict=True)
    return tuple(
        _compare_row(row, mine, theirs, num_alike, reach=_reach(row, noise, places), is_drawn=is_drawn)
        for row, (mine, theirs, num_alike) in enumerate(rows)
    )


def _reach(row: int, noise: torch.Tensor | None, places: torch.Tensor | None) -> float | None:
    """The margin that noise may turn round behind a prompt, by what nearly all of the prompt's tokens suffer."""
    if noise is None or places is None:
        return None
    return REACH * float(torch.quantile(noise[places[:, 0] == row], _NOISE_QUANTILE))


def _compare_row(
    row: int,
    mine: Continuation,
    theirs: Continuation,
    num_alike: int,
    *,
    reach: float | None,
    is_drawn: bool,
) -> GeneratedRow:
    num_compared = min(len(mine.generated_ids), len(theirs.generated_ids))
    if num_alike == num_compared:
        status = SiteStatus.NOT_JUDGED if is_drawn or not num_compared else SiteStatus.PASS
        reason = "the golden drew its tokens" if is_drawn else ""
        return GeneratedRow(
            row=row, num_compared=num_compared, num_alike=num_alike, status=status, reason=reason
        )
    wanted, found = mine.generated_ids[num_alike], theirs.generated_ids[num_alike]
    margin, is_kept = _margin(mine, num_alike, found)
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
    return GeneratedRow(
        row=row,
        num_compared=num_compared,
        num_alike=num_alike,
        status=status,
        reason=reason,
        reference=wanted,
        target=found,
        margin=margin,
        reach=reach,
    )


def _margin(golden: Continuation, index: int, token: int) -> tuple[float | None, bool]:
    """How far a token's logit was below the golden's choice, and whether it was kept: else it was further than that."""
    if index >= len(golden.likeliest) or not golden.likeliest[index]:
        return None, False
    for one in golden.likeliest[index]:
        if one.token == token:
            return one.behind, True
    return golden.likeliest[index][-1].behind, False
