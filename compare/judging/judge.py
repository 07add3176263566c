"""Judging: two tensors of one site become a result; it fails closed, and says what is wrong.

T judged tokens, F channels of a site.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from compare.judging.noise_judge import count_unflipped, judge_noise, judge_without_floor
from compare.limits.criteria import Criteria, Judgement, judge_classic
from compare.limits.limit_context import LimitContext
from compare.limits.limits import NoiseLimits
from compare.noise.rho import noise_ratio
from compare.noise.rows import Rows
from compare.noise.squared_errors import TINY, square_difference, square_rows
from minimax_tools.errors import IncomparableError
from minimax_tools.metrics.pair_metrics import PairMetrics, compare_tensors
from minimax_tools.results.results import RelativeError, SiteResult, SiteStatus


def judge_values(
    result: SiteResult,
    rows: Rows,
    *,
    criteria: Criteria,
    context: LimitContext,
    set_aside: torch.Tensor | None = None,
    replayed: Rows | None = None,
) -> SiteResult:
    """Judge the values of one site.

    Args:
        result: Which layer and site; its other fields are filled in.
        rows: Both sides' tokens.
        criteria: How to judge.
        context: What the limits hang on beside.
        set_aside: Tokens that ρ must leave out, bool [T].
        replayed: What ρ is taken of: the same rows, the golden's with the port's own experts. None for `rows`.

    Raises:
        IncomparableError: The golden holds NaN or Inf on a real row.
    """
    metrics = _measure(rows, criteria)
    if metrics.num_nonfinite_reference:
        raise _unusable(result, metrics)
    result = replace(result, metrics=metrics, classic_failures=criteria.classic.failures(metrics))
    if metrics.num_nonfinite_target:
        return replace(result, status=SiteStatus.FAIL, reason=_describe_nonfinite(rows, metrics))
    if criteria.name == "classic":
        return _concluded(result, judge_classic(result))
    if rows.input_error is not None and not rows.input_error.is_finite:
        return replace(result, status=SiteStatus.FAIL, reason="the layer's input already held NaN or Inf")
    judged = rows if replayed is None else replayed
    if set_aside is not None and bool(set_aside.any()):
        judged = judged.select(~set_aside)
    if context.hides_flips and not judged.has_floor:
        judged = _nearest_tokens(judged, criteria.noise, context)
    result = replace(result, num_set_aside=rows.num_tokens - judged.num_tokens)
    if judged.num_tokens == 0:
        reason = "no token is left on which both sides are sure to choose the same experts"
        return replace(result, status=SiteStatus.NOT_JUDGED, reason=reason)
    judged_metrics = metrics if judged is rows else _measure(judged, criteria)
    result = replace(result, num_judged=judged.num_tokens)
    if not judged.has_floor:
        input_error = judged.input_error.overall if judged.input_error else 0.0
        relative = RelativeError(value=judged_metrics.relative_l2, incoming=input_error)
        result = replace(result, relative=relative)
        judgement, nearest = judge_without_floor(
            relative, criteria.noise, site=result.site, num_tokens=judged.num_tokens, context=context
        )
        return _concluded(replace(result, nearest=nearest), _note_dtype(judgement, judged))
    noise = noise_ratio(judged)
    judgement, closest = judge_noise(
        noise,
        judged_metrics,
        criteria.noise,
        site=result.site,
        num_tokens=judged.num_tokens,
        num_channels=judged.reference.shape[1],
        context=context,
    )
    return _concluded(replace(result, noise=noise, nearest=closest), _note_dtype(judgement, judged))


def _measure(rows: Rows, criteria: Criteria) -> PairMetrics:
    metrics = compare_tensors(rows.reference, rows.target, rtol=criteria.rtol, atol=criteria.atol)
    token, channel = metrics.worst_index
    return replace(metrics, worst_index=(*rows.places[token].tolist(), channel))


def _nearest_tokens(rows: Rows, limits: NoiseLimits, context: LimitContext) -> Rows:
    """Keep the tokens nearest to the golden's, as many as are sure to have its experts."""
    input_error = rows.input_error.overall if rows.input_error else 0.0
    num_kept = count_unflipped(rows.num_tokens, limits, input_error=input_error, context=context)
    if num_kept == rows.num_tokens:
        return rows
    error = square_difference(rows.reference, rows.target, massive=rows.massive).whole
    relative = error / square_rows(rows.reference, massive=rows.massive).whole.clamp(min=TINY)
    kept = torch.zeros(rows.num_tokens, dtype=torch.bool)
    kept[relative.argsort()[:num_kept]] = True
    return rows.select(kept)


def _unusable(result: SiteResult, metrics: PairMetrics) -> IncomparableError:
    place = f"{result.site} of layer {result.layer}" if result.layer is not None else result.site
    return IncomparableError(
        f"the golden's {place} holds {metrics.num_nonfinite_reference} NaN or Inf on real rows",
        next_step="Make the golden again: no port can be judged by this one.",
    )


def _describe_nonfinite(rows: Rows, metrics: PairMetrics) -> str:
    first = int((~rows.target.isfinite()).any(dim=-1).nonzero()[0])
    row, position = rows.places[first].tolist()
    count = metrics.num_nonfinite_target
    return f"{count} NaN or Inf on real rows, the first at row {row}, position {position}"


def _note_dtype(judgement: Judgement, rows: Rows) -> Judgement:
    """Warn of a pass in another dtype than the golden's."""
    if judgement[0] is SiteStatus.PASS and rows.dtype != rows.target.dtype:
        return SiteStatus.WARN, f"dtype: expected {rows.dtype}, found {rows.target.dtype}"
    return judgement


def _concluded(result: SiteResult, judgement: Judgement) -> SiteResult:
    status, reason = judgement
    return replace(result, status=status, reason=reason)
