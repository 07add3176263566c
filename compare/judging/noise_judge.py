"""Judging by noise: the figures of one site, held against limits that right ports stay below.

The figures are ρ and its averages (see noise/rho.py), or the relative error if the golden kept no noise floor. Limits
get wider the smaller the share of false alarms that one figure is allowed, `context.share`. A limit measured on another
backend than the port's warns up to `limits.slack` times its value. `incoming` is the relative error of a layer's input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from compare.limits.criteria import Judgement
from compare.limits.limit_context import LimitContext
from compare.limits.limits import (
    FEWEST_FOR_STRUCTURE,
    NOISE_FIGURES,
    RATIO_FIGURES,
    STRUCTURE_FIGURES,
    NoiseLimits,
)
from minimax_tools.metrics.pair_metrics import PairMetrics
from minimax_tools.results.results import NearestLimit, NoiseRatio, RelativeError, SiteStatus

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
    figures = tuple(
        _limited_figures(
            noise, limits, site=site, num_tokens=num_tokens, num_channels=num_channels, context=context
        )
    )
    nearest = max(figures, key=lambda figure: figure.excess, default=None)
    if nearest is None or nearest.excess <= 1.0:
        return (SiteStatus.PASS, ""), nearest
    # The error over all tokens and channels, the first figure if it has a limit, says more than a part of it that is
    # further beyond its limit.
    first = figures[0]
    named = first if first.figure == "whole" and first.excess > 1.0 else nearest
    scale = f", norm ×{metrics.norm_ratio:.3g}" if abs(metrics.norm_ratio - 1.0) > _TELLING_SCALE else ""
    reason = f"{describe_figure(named, noise)}, limit {named.limit:.3g}{scale}"
    is_anywhere = any(_is_broken_anywhere(figure, limits) for figure in figures)
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


def _limited_figures(
    noise: NoiseRatio,
    limits: NoiseLimits,
    *,
    site: str,
    num_tokens: int,
    num_channels: int,
    context: LimitContext,
) -> Iterator[NearestLimit]:
    """Yield every figure that has a limit, with that limit, in the order of `NOISE_FIGURES`."""
    table = limits.of_ratios(
        is_chained=noise.incoming > 0.0, is_estimated=noise.is_estimated, is_widened=noise.is_widened
    )
    # The worst of many is further off by chance than a single one, so its share is divided by their number.
    among = {"token_worst": num_tokens, "channel_worst": num_channels}
    figures = NOISE_FIGURES if num_tokens >= FEWEST_FOR_STRUCTURE else RATIO_FIGURES
    for figure in figures:
        value, limit = getattr(noise, figure), table.find(site, figure)
        if value is not None and limit is not None:
            share = context.share / max(among.get(figure, 1), 1)
            yield NearestLimit(
                figure=figure,
                # NaN, which compares as not greater, must break the limit.
                value=math.inf if math.isnan(value) else value,
                limit=limit.at(num_tokens=num_tokens, share=share),
            )


def _is_broken_anywhere(nearest: NearestLimit, limits: NoiseLimits) -> bool:
    """Decide whether a limit is broken by more than the slack of other backends, so that the backend does not matter.

    Averages never are: hardware that was not measured may approximate a function with an error in one direction, which
    averages show however small it is.
    """
    return nearest.figure not in STRUCTURE_FIGURES and nearest.excess > limits.slack
