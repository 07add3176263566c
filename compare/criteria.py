"""Classic criteria: the five limits of the tools that mm2 replaces; those of noise are in `limits`."""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.metrics import PairMetrics
from minimax_tools.results import SiteStatus

DEFAULT_RTOL, DEFAULT_ATOL = 1e-2, 1e-3

_CORRELATIONS = ("cosine_similarity", "pearson_correlation")

Judgement = tuple[SiteStatus, str]


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


def judge_classic(failures: tuple[str, ...]) -> Judgement:
    """Judge a site by the seeds' limits."""
    return (SiteStatus.FAIL, "; ".join(failures)) if failures else (SiteStatus.PASS, "")
