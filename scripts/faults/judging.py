"""Judging: what mm2 says of a capture, layer by layer, with all sites shown and with the output alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from compare.comparer import compare_captures
from compare.limits.criteria import DEFAULT_ATOL, DEFAULT_RTOL, Criteria
from compare.limits.limits import NoiseLimits
from compare.limits.limits_file import calibrated_limits
from compare.sides.golden_weights import CheckpointWeights
from faults.scene import Scene
from minimax_tools.capture.reader import Capture
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVerdict:
    """What was said of one layer.

    Args:
        failed: Sites that fail.
        warned: Sites that warn.
        blamed: The sets of sites that are to blame, in execution order.
        reason: Of the first blame, or of the first failure.
        excess: At each site, the largest share of a limit that a figure comes to; infinite where the site fails by
            what no limit of noise decides.
    """

    failed: tuple[str, ...]
    warned: tuple[str, ...]
    blamed: tuple[tuple[str, ...], ...]
    reason: str
    excess: Mapping[str, float]

    @property
    def is_detected(self) -> bool:
        """Whether the layer is said to be wrong."""
        return bool(self.failed or self.blamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """Verdict on a run.

    Args:
        verdict: The conclusion.
        layers: What was said of each layer.
    """

    verdict: str
    layers: Mapping[int, LayerVerdict]


def judge_run(scene: Scene, capture: Capture, *, limits: NoiseLimits | None = None) -> RunVerdict:
    """Return what mm2 says with the model at hand, as mm2-test does; by its default limits unless others are given."""
    comparison = compare_captures(
        scene.golden,
        capture,
        criteria=default_criteria(limits),
        layer_pattern="layer_*",
        weights=CheckpointWeights(model=str(scene.folder)),
    )
    return RunVerdict(
        verdict=str(comparison.verdict),
        layers={layer: _verdict(comparison, layer) for layer in comparison.layers},
    )


def default_criteria(limits: NoiseLimits | None = None) -> Criteria:
    """The default criteria; by other limits where some are given."""
    return Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL, noise=limits or calibrated_limits())


def measure_excess(result: SiteResult) -> float:
    """The largest share of a limit that a figure of a site comes to; infinite where it fails by something else."""
    excess = result.nearest.excess if result.nearest else 0.0
    return math.inf if result.status is SiteStatus.FAIL and excess <= 1.0 else excess


def _verdict(comparison: Comparison, layer: int) -> LayerVerdict:
    sites = comparison.of_layer(layer)
    failed = [site for site in sites if site.status is SiteStatus.FAIL]
    blame = [blame for blame in comparison.blame if blame.layer == layer]
    reasons = [*(one.reason for one in blame), *(site.reason for site in failed), ""]
    return LayerVerdict(
        failed=tuple(site.site for site in failed),
        warned=tuple(site.site for site in sites if site.status is SiteStatus.WARN),
        blamed=tuple(one.sites for one in blame),
        reason=reasons[0],
        excess={site.site: measure_excess(site) for site in sites},
    )
