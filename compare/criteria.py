"""Criteria: the limits that turn figures into pass, warn and fail.

`noise` judges ρ. Its limits stand where clean runs do not reach (scripts/bench_clean_ports.py prints
the clean maxima); `classic` are the five limits of the tools that mm2 replaces.
"""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.metrics import PairMetrics
from minimax_tools.results import NoiseRatio, RoutingResult, SiteStatus

DEFAULT_RTOL, DEFAULT_ATOL = 1e-2, 1e-3

_CORRELATIONS = ("cosine_similarity", "pearson_correlation")

Judgement = tuple[SiteStatus, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseLimits:
    """Limits on ρ, in multiples of the golden's own BF16 error.

    Args:
        warn: Over all tokens; above it, a warning.
        fail: Over all tokens; over the ordinary and over the massive channels alone; and of the median token,
            which a few tokens with a large floor cannot outweigh.
        token_fail: Of the worst token.
        chained_fail: As `fail`, for a layer that was handed an input with an error of its own: that error
            grows unevenly (a flipped expert upsets one token), so single tokens are not judged there.
        relative_l2: Limit for goldens without a floor, BF16.
        relative_l2_float32: Limit for float32 runs, which have no BF16 noise.
        flipped_share: Share of flipped tokens allowed where no floor tells which are explained.
    """

    warn: float = 1.5
    fail: float = 2.0
    token_fail: float = 6.0
    chained_fail: float = 4.0
    relative_l2: float = 3e-2
    relative_l2_float32: float = 1e-5
    flipped_share: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicLimits:
    """The seeds' limits: a tensor that breaks one of the five fails."""

    max_abs_diff: float = 0.01
    mean_abs_diff: float = 0.001
    close_fraction: float = 0.95
    cosine_similarity: float = 0.99
    pearson_correlation: float = 0.99

    def failures(self, metrics: PairMetrics) -> tuple[str, ...]:
        """The limits that are broken, in words."""
        nonfinite = metrics.num_nonfinite_reference + metrics.num_nonfinite_target
        upper = [
            f"{name} {getattr(metrics, name):.4g} > {getattr(self, name):g}"
            for name in ("max_abs_diff", "mean_abs_diff")
            if not getattr(metrics, name) <= getattr(self, name)
        ]
        lower = [self._shortfall(metrics, name) for name in ("close_fraction", *_CORRELATIONS)]
        broken = (*upper, *filter(None, lower))
        return (f"{nonfinite} elements are not finite", *broken) if nonfinite else broken

    def _shortfall(self, metrics: PairMetrics, name: str) -> str | None:
        value, limit = getattr(metrics, name), getattr(self, name)
        if value is None:
            # A side is zero or constant; only where the other is the same may that pass.
            return None if metrics.relative_l2 == 0.0 else f"{name} is not defined"
        return None if value >= limit else f"{name} {value:.4g} < {limit:g}"


def judge_noise(noise: NoiseRatio, metrics: PairMetrics, limits: NoiseLimits) -> Judgement:
    """Judge a site by ρ."""
    worst = max(noise.whole, noise.ordinary, noise.massive or 0.0, noise.token_median)
    scale = f", norm ×{metrics.norm_ratio:.3g}" if abs(metrics.norm_ratio - 1.0) > 0.02 else ""
    is_handed_error = noise.incoming > 0.0
    limit = limits.chained_fail if is_handed_error else limits.fail
    if not worst <= limit:
        return SiteStatus.FAIL, f"error {_times(worst)} the noise floor, limit {limit:g}{scale}"
    if not is_handed_error and not noise.token_worst <= limits.token_fail:
        row, position = noise.worst_token
        return (
            SiteStatus.FAIL,
            f"error {_times(noise.token_worst)} the noise floor at row {row}, position {position}, "
            f"limit {limits.token_fail:g}{scale}",
        )
    if not is_handed_error and worst > limits.warn:
        return SiteStatus.WARN, f"error {_times(worst)} the noise floor, unusual above {limits.warn:g}"
    return SiteStatus.PASS, ""


def judge_without_floor(metrics: PairMetrics, limit: float) -> Judgement:
    """Judge a site by relative L2, where the golden kept no floor."""
    if not metrics.relative_l2 <= limit:
        return SiteStatus.FAIL, f"relative L2 {metrics.relative_l2:.3g}, limit {limit:g} (no noise floor)"
    return SiteStatus.PASS, ""


def judge_routing(routing: RoutingResult, limits: NoiseLimits, *, has_floor: bool) -> Judgement:
    """Judge expert sets: noise must explain every flip; where the noise is not known, there must be few."""
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
    flips = f"{routing.num_flipped} of {routing.num_tokens} tokens chose other experts (no noise floor)"
    is_rare = routing.num_flipped <= limits.flipped_share * routing.num_tokens
    return SiteStatus.PASS if is_rare else SiteStatus.FAIL, flips


def judge_classic(failures: tuple[str, ...]) -> Judgement:
    """Judge a site by the seeds' limits."""
    return (SiteStatus.FAIL, "; ".join(failures)) if failures else (SiteStatus.PASS, "")


def _times(ratio: float) -> str:
    return f"{ratio:.3g}×"
