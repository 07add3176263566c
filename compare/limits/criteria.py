"""Criteria: what a comparison judges by: limits on noise (see `limits`), or five classic limits on layer outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from compare.limits.limits import NoiseLimits
from compare.limits.limits_file import calibrated_limits
from minimax_tools.metrics.pair_metrics import PairMetrics
from minimax_tools.model.sites import Site
from minimax_tools.results.results import SiteResult, SiteStatus

OUTPUTS_ALONE = "the classic limits judge layer outputs alone"
# The classic figures that a limit bounds from above, and those that it bounds from below.
_BOUNDED_ABOVE = ("max_abs_diff", "mean_abs_diff")
_BOUNDED_BELOW = ("close_fraction", "cosine_similarity", "pearson_correlation")

# A status and its reason in a sentence.
Judgement = tuple[SiteStatus, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicLimits:
    """Limits of the five figures: a layer whose output breaks one of them fails."""

    max_abs_diff: float = 0.01  # largest difference allowed, in units of the site
    mean_abs_diff: float = 0.001  # largest mean difference allowed, in units of the site
    close_fraction: float = 0.95  # smallest share of close elements (see `Criteria`) allowed, from 0 to 1
    cosine_similarity: float = 0.99  # smallest value allowed
    pearson_correlation: float = 0.99  # smallest value allowed

    def __str__(self) -> str:
        upper = (f"{name} <= {getattr(self, name):g}" for name in _BOUNDED_ABOVE)
        lower = (f"{name} >= {getattr(self, name):g}" for name in _BOUNDED_BELOW)
        return ", ".join((*upper, *lower))

    def failures(self, metrics: PairMetrics) -> tuple[str, ...]:
        """Return the limits that are broken, in words."""
        num_nonfinite = metrics.num_nonfinite_reference + metrics.num_nonfinite_target
        # `not <=`, so that NaN breaks a limit.
        upper = [
            f"{name} {getattr(metrics, name):.4g} > {getattr(self, name):g}"
            for name in _BOUNDED_ABOVE
            if not getattr(metrics, name) <= getattr(self, name)
        ]
        lower = [self._shortfall(metrics, name) for name in _BOUNDED_BELOW]
        broken = (*upper, *filter(None, lower))
        return (f"{num_nonfinite} elements are not finite", *broken) if num_nonfinite else broken

    def _shortfall(self, metrics: PairMetrics, name: str) -> str | None:
        """Return how a figure falls below its limit, in words; None if it does not."""
        value, limit = getattr(metrics, name), getattr(self, name)
        if value is None:
            # Not defined for a side that is zero or constant: it passes only if both sides are equal.
            return None if metrics.relative_l2 == 0.0 else f"{name} is not defined"
        return None if value >= limit else f"{name} {value:.4g} < {limit:g}"


def judge_classic(result: SiteResult) -> Judgement:
    """Judge a layer's output by the limits that it breaks, which the result lists; other sites are not judged."""
    if result.layer is None or result.site != Site.OUTPUT:
        return SiteStatus.NOT_JUDGED, OUTPUTS_ALONE
    failures = result.classic_failures
    return (SiteStatus.FAIL, "; ".join(failures)) if failures else (SiteStatus.PASS, "")


def layers_without_output(results: Iterable[SiteResult]) -> tuple[int, ...]:
    """Return the layers whose output was not compared, ascending: classic limits cannot judge them."""
    sites = tuple(result for result in results if result.layer is not None)
    compared = {site.layer for site in sites if site.site == Site.OUTPUT and site.status.is_compared}
    return tuple(sorted({site.layer for site in sites if site.layer is not None} - compared))


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """Limits and tolerances to judge by."""

    name: str  # `noise`, `classic`, or the file that the limits of noise were read from
    rtol: float  # an element is close to the golden's within atol + rtol · |golden|
    atol: float
    noise: NoiseLimits = field(default_factory=calibrated_limits)  # limits that tell noise from faults
    classic: ClassicLimits = field(default_factory=ClassicLimits)
    num_figures: int = 1  # number of figures that the comparison judges: the more, the wider the limits

    @property
    def share(self) -> float:
        """Share of false alarms allowed to each figure."""
        return self.noise.share(self.num_figures)
