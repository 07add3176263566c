"""Judging by noise: figures of one site against the limits that ports which are right stay below."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from compare.limits.criteria import Judgement
from compare.limits.limit import most_hits
from compare.limits.limit_context import LimitContext
from compare.limits.limits import (
    FEWEST_FOR_STRUCTURE,
    NOISE_FIGURES,
    RATIO_FIGURES,
    STRUCTURE_FIGURES,
    NoiseLimits,
)
from minimax_tools.metrics.pair_metrics import PairMetrics
from minimax_tools.model.sites import Site
from minimax_tools.results.choices import RoutingResult
from minimax_tools.results.results import NearestLimit, NoiseRatio, RelativeError, SiteStatus

# The scale of a value is told where it is this far off.
_TELLING_SCALE = 0.02
_MANY_TOKENS = 16
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "whole": "error {value} the noise floor",
        "ordinary": "error {value} the noise floor in the ordinary channels",
        "massive": "error {value} the noise floor in the massive channels",
        "token_median": "error {value} the noise floor at the median token",
        "token_p99": "error {value} the noise floor at one token in a hundred",
        "token_worst": "error {value} the noise floor at row {row}, position {position}",
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
    """Judge a site by ρ and the figures beside it.

    Args:
        noise: The figures.
        metrics: The seeds' metrics, which tell the scale.
        limits: What right ports stay below.
        site: The site's name.
        num_tokens: How many tokens the figures are of.
        num_channels: How many channels the site has.
        context: What else the limits hang on.

    Returns:
        The judgement, and the limit that decided or came nearest to it.
    """
    found = tuple(
        _held_limits(
            noise, limits, site=site, num_tokens=num_tokens, num_channels=num_channels, context=context
        )
    )
    nearest = max(found, key=lambda one: one.excess, default=None)
    if nearest is None or nearest.excess <= 1.0:
        return (SiteStatus.PASS, ""), nearest
    # The error over everything says more than a part of it that happens to be further beyond its limit.
    told = found[0] if found[0].figure == "whole" and found[0].excess > 1.0 else nearest
    scale = f", norm ×{metrics.norm_ratio:.3g}" if abs(metrics.norm_ratio - 1.0) > _TELLING_SCALE else ""
    reason = f"{_describe(told, noise)}, limit {told.limit:.3g}{scale}"
    is_anywhere = any(_is_broken_anywhere(one, limits) for one in found)
    return judge_broken(reason, limits, context=context, is_anywhere=is_anywhere), nearest


def judge_broken(reason: str, limits: NoiseLimits, *, context: LimitContext, is_anywhere: bool) -> Judgement:
    """Judge a broken limit: a warning where it was not measured on the port's backend, and is not broken by far.

    Args:
        reason: Which limit, and by how much.
        limits: Where they were measured.
        context: Where the port ran.
        is_anywhere: Whether it is broken so far that it hangs on no backend.
    """
    if limits.is_measured_on(context.backend) or is_anywhere:
        return SiteStatus.FAIL, reason
    where = "its backend is not known" if context.backend is None else f"not measured on {context.backend}"
    return SiteStatus.WARN, f"{reason} ({where})"


def judge_without_floor(
    relative: RelativeError, limits: NoiseLimits, *, site: str, num_tokens: int, context: LimitContext
) -> tuple[Judgement, NearestLimit]:
    """Judge a site by its relative L2 error, where the golden kept no floor: by what BF16 usually costs there."""
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
    """Return the largest relative L2 error that is still noise, of a layer with that relative input error."""

    def limit(figure: str) -> float:
        return limits.floorless(site, figure).at(num_tokens=num_tokens, share=context.share)

    layer_error = limits.float32 if context.is_float32 else limit("relative_l2")
    return math.hypot(layer_error, limit("amplification") * input_error if input_error else 0.0)


def count_unflipped(
    num_tokens: int, limits: NoiseLimits, *, input_error: float, context: LimitContext
) -> int:
    """Count the tokens that are sure to have the golden's experts, where the port does not show its choice.

    In a deep chain nearly all may have others; the best quarter of many tokens is then judged all the same.
    """
    chance = flip_chance(input_error, limits, context=context)
    sure = num_tokens - most_hits(num_tokens, chance=chance, share=context.share)
    return max(sure, num_tokens // 4 if num_tokens >= _MANY_TOKENS else 0)


def flip_chance(input_error: float, limits: NoiseLimits, *, context: LimitContext) -> float:
    """Return the chance that a token's experts flip without a fault, where no floor tells its margin.

    They flip the more, the more the router's logits are off: by their own noise, and by the input error.
    """
    chance = limits.floorless(Site.ROUTER_EXPERTS, "flipped_share").usual
    layer_error = (
        limits.float32 if context.is_float32 else limits.floorless(Site.ROUTER_LOGITS, "relative_l2").usual
    )
    bfloat16 = limits.floorless(Site.ROUTER_LOGITS, "relative_l2").usual
    return min(chance * math.hypot(layer_error, input_error) / bfloat16, 1.0)


def judge_routing(
    routing: RoutingResult, limits: NoiseLimits, *, has_floor: bool, input_error: float, context: LimitContext
) -> Judgement:
    """Judge expert sets: noise must explain every flip; where the noise is not known, there must be few.

    Args:
        routing: The flips.
        limits: What right ports stay below.
        has_floor: Whether the golden tells margins and noise.
        input_error: Relative error of the layer's input; 0 in isolated runs.
        context: What else the limits hang on.
    """
    if has_floor and routing.num_unexplained:
        margin = routing.widest_unexplained_margin
        return (
            SiteStatus.FAIL,
            f"{routing.num_unexplained} of {routing.num_tokens} tokens chose other experts beyond noise "
            f"(widest margin {margin:.3g})",
        )
    if has_floor:
        return SiteStatus.PASS, f"{routing.num_flipped} flips within noise" if routing.num_flipped else ""
    if routing.num_flipped == 0:
        return SiteStatus.PASS, ""
    chance = flip_chance(input_error, limits, context=context)
    most = most_hits(routing.num_tokens, chance=chance, share=context.share)
    flips = f"{routing.num_flipped} of {routing.num_tokens} tokens chose other experts (no noise floor)"
    if routing.num_flipped <= most:
        return SiteStatus.PASS, flips
    return SiteStatus.FAIL, f"{flips}, limit {most}"


def _held_limits(
    noise: NoiseRatio,
    limits: NoiseLimits,
    *,
    site: str,
    num_tokens: int,
    num_channels: int,
    context: LimitContext,
) -> Iterator[NearestLimit]:
    """Yield every figure that has a limit, in their order."""
    table = limits.of_ratios(
        is_chained=noise.incoming > 0.0, is_estimated=noise.is_estimated, is_widened=noise.is_widened
    )
    # The worst of many is further off than one of them.
    among = {"token_worst": num_tokens, "channel_worst": num_channels}
    figures = NOISE_FIGURES if num_tokens >= FEWEST_FOR_STRUCTURE else RATIO_FIGURES
    for figure in figures:
        value, limit = getattr(noise, figure), table.find(site, figure)
        if value is not None and limit is not None:
            share = context.share / max(among.get(figure, 1), 1)
            yield NearestLimit(
                figure=figure,
                value=math.inf if math.isnan(value) else value,
                limit=limit.at(num_tokens=num_tokens, share=share),
            )


def _is_broken_anywhere(found: NearestLimit, limits: NoiseLimits) -> bool:
    """Decide whether a limit is broken so far that the backend does not matter.

    Hardware that was not measured may well round in other places; a function that it approximates may be off in
    one direction, which averages show however little it is.
    """
    return found.figure not in STRUCTURE_FIGURES and found.excess > limits.slack


def _describe(found: NearestLimit, noise: NoiseRatio) -> str:
    row, position = noise.worst_token
    words = _WORDS[found.figure]
    return words.format(value=f"{found.value:.3g}×", row=row, position=position, channel=noise.worst_channel)
