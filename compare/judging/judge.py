"""Judging the values of one site: both sides' tokens become a result with a status and a reason.

Whatever cannot be measured fails. A golden with a noise floor is judged by ρ and its averages (see noise/rho.py),
another by the relative error. Limits get wider the smaller the share of false alarms that one figure is allowed, and a
limit measured on another backend than the port's warns up to `limits.slack` times its value. T real tokens of the site.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from compare.judging.routing import count_unflipped
from compare.limits.criteria import Criteria, Judgement, judge_classic
from compare.limits.limits import (
    FEWEST_FOR_STRUCTURE,
    NOISE_FIGURES,
    RATIO_FIGURES,
    STRUCTURE_FIGURES,
    LimitContext,
    NoiseLimits,
)
from compare.noise.rho import noise_ratio
from compare.noise.rows import TINY, Rows, square_difference, square_rows
from minimax_tools.errors import IncomparableError
from minimax_tools.metrics.pair_metrics import PairMetrics, compare_tensors
from minimax_tools.results.results import NearestLimit, NoiseRatio, RelativeError, SiteResult, SiteStatus
from minimax_tools.stored_dtype import dtype_name

# A reason states the ratio of the norms if it is further from 1 than this.
_TELLING_SCALE = 0.02
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "whole": "error {value} the noise floor",
        "ordinary": "error {value} the noise floor in the ordinary channels",
        "massive": "error {value} the noise floor in the massive channels",
        "token_median": "error {value} the noise floor at the median token",
        "token_p99": "error {value} the noise floor at one token in a hundred",
        "token_worst": "error {value} the noise floor at row {row}, token {position}",
        "token_gain": "the tokens' scale is {value} as far off as BF16 leaves it",
        "channel_gain": "the channels' scale is {value} as far off as BF16 leaves it",
        "channel_offset": "the channels' mean is {value} as far off as BF16 leaves it",
        "channel_worst": "error {value} the noise floor in channel {channel}",
    }
)


def judge_noise(
    noise: NoiseRatio,
    metrics: PairMetrics,
    limits: NoiseLimits,
    *,
    site: str,
    num_tokens: int,
    num_channels: int,
    context: LimitContext,
) -> tuple[Judgement, NearestLimit | None]:
    """Judge a site by ρ and the figures beside it, over `num_tokens` tokens and `num_channels` channels.

    Beside the judgement stands the limit that decided it or came nearest; None if no figure is limited.
    """
    table = limits.of_ratios(
        is_chained=noise.incoming > 0.0, is_estimated=noise.is_estimated, is_widened=noise.is_widened
    )
    # The worst of many is further off by chance than a single one, so its share is divided by their number.
    among = {"token_worst": num_tokens, "channel_worst": num_channels}
    widening = limits.other_graphs if context.is_other_graph else 1.0
    figures = []
    for figure in NOISE_FIGURES if num_tokens >= FEWEST_FOR_STRUCTURE else RATIO_FIGURES:
        value, limit = getattr(noise, figure), table.find(site, figure)
        if value is not None and limit is not None:
            share = context.share / max(among.get(figure, 1), 1)
            # NaN, which compares as not greater, must break the limit.
            value = math.inf if math.isnan(value) else value
            most = widening * limit.at(num_tokens=num_tokens, share=share)
            figures.append(NearestLimit(figure=figure, value=value, limit=most))
    nearest = max(figures, key=lambda figure: figure.excess, default=None)
    if nearest is None or nearest.excess <= 1.0:
        return (SiteStatus.PASS, ""), nearest
    # The error over all tokens and channels, the first figure if it has a limit, says more than a part of it that is
    # further beyond its limit.
    first = figures[0]
    named = first if first.figure == "whole" and first.excess > 1.0 else nearest
    scale = f", norm ×{metrics.norm_ratio:.3g}" if abs(metrics.norm_ratio - 1.0) > _TELLING_SCALE else ""
    reason = f"{describe_figure(named, noise)}, limit {named.limit:.3g}{scale}"
    # Averages show however small an error of a function that other hardware approximates: no backend is ruled out.
    is_anywhere = any(
        figure.excess > limits.slack for figure in figures if figure.figure not in STRUCTURE_FIGURES
    )
    return judge_broken(reason, limits, context=context, is_anywhere=is_anywhere), nearest


def judge_broken(reason: str, limits: NoiseLimits, *, context: LimitContext, is_anywhere: bool) -> Judgement:
    """Judge a broken limit: it fails, or warns if it was measured on another backend and is not broken by far.

    `is_anywhere` says that it is broken so far that no backend could explain it.
    """
    if limits.is_measured_on(context.backend) or is_anywhere:
        return SiteStatus.FAIL, reason
    where = "its backend is not known" if context.backend is None else f"not measured on {context.backend}"
    return SiteStatus.WARN, f"{reason} ({where})"


def describe_figure(nearest: NearestLimit, noise: NoiseRatio) -> str:
    """Return a figure of a site in words, with the token or channel that it is of."""
    row, position = noise.worst_token
    words = _WORDS[nearest.figure]
    return words.format(
        value=f"{nearest.value:.3g}×", row=row, position=position, channel=noise.worst_channel
    )


def judge_without_floor(
    relative: RelativeError, limits: NoiseLimits, *, site: str, num_tokens: int, context: LimitContext
) -> tuple[Judgement, NearestLimit]:
    """Judge a site by its relative L2 error, against what BF16 usually costs there: for a golden without a floor."""
    limit = floorless_limit(relative.incoming, limits, site=site, num_tokens=num_tokens, context=context)
    nearest = NearestLimit(figure="relative_l2", value=relative.value, limit=limit)
    if not relative.value <= limit:
        reason = f"relative L2 {relative.value:.3g}, limit {limit:.3g} (no noise floor)"
        is_anywhere = not nearest.excess <= limits.slack
        return judge_broken(reason, limits, context=context, is_anywhere=is_anywhere), nearest
    return (SiteStatus.PASS, ""), nearest


def floorless_limit(
    input_error: float, limits: NoiseLimits, *, site: str, num_tokens: int, context: LimitContext
) -> float:
    """Return the largest relative L2 error that is still noise, for a layer with a relative input error."""

    def limit(figure: str) -> float:
        return limits.floorless(site, figure).at(num_tokens=num_tokens, share=context.share)

    layer_error = limits.float32 if context.is_float32 else limit("relative_l2")
    return math.hypot(layer_error, limit("amplification") * input_error)


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
    nearest: NearestLimit | None
    if judged.has_floor:
        noise = noise_ratio(judged)
        result = replace(result, noise=noise)
        judgement, nearest = judge_noise(
            noise,
            judged_metrics,
            criteria.noise,
            site=result.site,
            num_tokens=judged.num_tokens,
            num_channels=judged.reference.shape[1],
            context=context,
        )
    else:
        relative = RelativeError(value=judged_metrics.relative_l2, incoming=_overall(judged))
        result = replace(result, relative=relative)
        judgement, nearest = judge_without_floor(
            relative, criteria.noise, site=result.site, num_tokens=judged.num_tokens, context=context
        )
    return _conclude(replace(result, nearest=nearest), _note_dtype(judgement, judged))


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


def _overall(rows: Rows) -> float:
    return rows.input_error.overall if rows.input_error else 0.0


def _measure(rows: Rows, criteria: Criteria) -> PairMetrics:
    """Measure the classic figures; the worst element's index becomes row, position and channel."""
    metrics = compare_tensors(rows.reference, rows.target, rtol=criteria.rtol, atol=criteria.atol)
    token, channel = metrics.worst_index
    return replace(metrics, worst_index=(*rows.places[token].tolist(), channel))


def _nearest_tokens(rows: Rows, limits: NoiseLimits, context: LimitContext) -> Rows:
    """Keep the tokens nearest to the golden's, as many as surely have the golden's experts."""
    num_kept = count_unflipped(rows.num_tokens, limits, input_error=_overall(rows), context=context)
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
