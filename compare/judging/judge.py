"""Judging the values of one site: both sides' tokens become a result with a status and a reason.

Whatever cannot be measured fails. A golden with a noise floor is judged by ρ (see noise/rho.py), another by the
relative error. T real tokens of the site.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from compare.judging.noise_judge import judge_noise, judge_without_floor
from compare.judging.routing import count_unflipped
from compare.limits.criteria import Criteria, Judgement, judge_classic
from compare.limits.limit_context import LimitContext
from compare.limits.limits import NoiseLimits
from compare.noise.rho import noise_ratio
from compare.noise.rows import Rows
from compare.noise.squared_errors import TINY, square_difference, square_rows
from minimax_tools.capture.digests import dtype_name
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
        result: A result with layer and site; its other fields are filled in.
        rows: Both sides' tokens.
        criteria: The limits to judge by: those of noise, or the five classic ones, such as a cosine of 0.99.
        context: Facts of both sides that limits depend on.
        set_aside: Tokens that noise does not judge, since the port's experts may be others there, bool [T].
        replayed: `rows` with the golden computed with the port's experts, for noise to judge; None to judge `rows`.

    Raises:
        IncomparableError: The golden holds NaN or Inf on a real token.
    """
    metrics = _measure(rows, criteria)
    if metrics.num_nonfinite_reference:
        raise _unusable(result, metrics)
    result = replace(result, metrics=metrics, classic_failures=criteria.classic.failures(metrics))
    if metrics.num_nonfinite_target:
        return replace(result, status=SiteStatus.FAIL, reason=_describe_nonfinite(rows, metrics))
    if criteria.name == "classic":
        return _conclude(result, judge_classic(result))
    if rows.input_error is not None and not rows.input_error.is_finite:
        return replace(result, status=SiteStatus.FAIL, reason="the layer's input already held NaN or Inf")
    judged = rows if replayed is None else replayed
    if set_aside is not None and bool(set_aside.any()):
        judged = judged.select(~set_aside)
    # Flips that are not shown are the tokens furthest off. With a floor they are in `set_aside` already.
    if context.hides_flips and not judged.has_floor:
        judged = _nearest_tokens(judged, criteria.noise, context)
    result = replace(result, num_set_aside=rows.num_tokens - judged.num_tokens)
    if judged.num_tokens == 0:
        reason = "no token is left on which both sides are sure to choose the same experts"
        return replace(result, status=SiteStatus.NOT_JUDGED, reason=reason)
    judged_metrics = metrics if judged is rows else _measure(judged, criteria)
    result = replace(result, num_judged=judged.num_tokens)
    if judged.has_floor:
        return _judge_with_floor(result, judged, judged_metrics, criteria.noise, context)
    return _judge_without_floor(result, judged, judged_metrics, criteria.noise, context)


def measure_golden(
    result: SiteResult, golden: torch.Tensor, port: torch.Tensor, places: torch.Tensor, *, criteria: Criteria
) -> SiteResult:
    """Measure the golden's own values [T,F] against the port's, where a site was judged by others.

    The figures of the others are kept as `own_input_metrics`. `places` [T,2] are row and position of the tokens.
    """
    massive = torch.zeros(golden.shape[1], dtype=torch.bool)
    rows = Rows(reference=golden, target=port, massive=massive, places=places)
    metrics = _measure(rows, criteria)
    return replace(
        result,
        metrics=metrics,
        own_input_metrics=result.metrics,
        classic_failures=criteria.classic.failures(metrics),
    )


def _judge_with_floor(
    result: SiteResult, rows: Rows, metrics: PairMetrics, limits: NoiseLimits, context: LimitContext
) -> SiteResult:
    noise = noise_ratio(rows)
    judgement, nearest = judge_noise(
        noise,
        metrics,
        limits,
        site=result.site,
        num_tokens=rows.num_tokens,
        num_channels=rows.reference.shape[1],
        context=context,
    )
    return _conclude(replace(result, noise=noise, nearest=nearest), _note_dtype(judgement, rows))


def _judge_without_floor(
    result: SiteResult, rows: Rows, metrics: PairMetrics, limits: NoiseLimits, context: LimitContext
) -> SiteResult:
    input_error = rows.input_error.overall if rows.input_error else 0.0
    relative = RelativeError(value=metrics.relative_l2, incoming=input_error)
    judgement, nearest = judge_without_floor(
        relative, limits, site=result.site, num_tokens=rows.num_tokens, context=context
    )
    return _conclude(replace(result, relative=relative, nearest=nearest), _note_dtype(judgement, rows))


def _measure(rows: Rows, criteria: Criteria) -> PairMetrics:
    """Measure the classic figures; the worst element's index becomes row, position and channel."""
    metrics = compare_tensors(rows.reference, rows.target, rtol=criteria.rtol, atol=criteria.atol)
    token, channel = metrics.worst_index
    return replace(metrics, worst_index=(*rows.places[token].tolist(), channel))


def _nearest_tokens(rows: Rows, limits: NoiseLimits, context: LimitContext) -> Rows:
    """Keep the tokens nearest to the golden's, as many as surely have the golden's experts."""
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
        f"the golden's {place} holds {metrics.num_nonfinite_reference} NaN or Inf on real tokens",
        next_step="Make the golden again: no port can be judged by this one.",
    )


def _describe_nonfinite(rows: Rows, metrics: PairMetrics) -> str:
    first = int((~rows.target.isfinite()).any(dim=-1).nonzero()[0])
    row, position = rows.places[first].tolist()
    count = metrics.num_nonfinite_target
    return f"{count} NaN or Inf on real tokens, the first at row {row}, token {position}"


def _note_dtype(judgement: Judgement, rows: Rows) -> Judgement:
    """Note a pass in another dtype than the golden's; one that cannot hold all of the golden's values warns."""
    golden, port = rows.dtype, rows.target.dtype
    if judgement[0] is not SiteStatus.PASS or golden == port:
        return judgement
    if torch.promote_types(golden, port) == port:
        return SiteStatus.PASS, f"shown in {dtype_name(port)}, where the golden holds {dtype_name(golden)}"
    return SiteStatus.WARN, f"dtype: expected {golden}, found {port}"


def _conclude(result: SiteResult, judgement: Judgement) -> SiteResult:
    status, reason = judgement
    return replace(result, status=status, reason=reason)
