"""Judging: mm2's verdict on a capture, with all its sites or as a black box, and its diagnosis of a black box.

A black box is a port that shows each layer's output and no other site.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from compare.comparer import compare_captures
from compare.diagnosis.diagnose import diagnose
from compare.limits.criteria import Criteria
from compare.limits.limits_file import calibrated_limits
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from faults.baseline import Baseline
from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus


def judge_run(baseline: Baseline, capture: Capture) -> Comparison:
    """Judge a run as mm2-test does, with the checkpoint."""
    return compare_captures(
        baseline.golden,
        capture,
        criteria=default_criteria(),
        layer_pattern="layer_*",
        weights=CheckpointWeights(model=str(baseline.folder)),
    )


def default_criteria() -> Criteria:
    """Build the default criteria."""
    return Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL, noise=calibrated_limits())


def _measure_excess(result: SiteResult) -> float:
    """Return the largest ratio of a site's figure to its limit; infinite if the site fails for another reason.

    Such reasons are NaN, another shape, and flips of experts beyond noise.
    """
    excess = result.nearest.excess if result.nearest else 0.0
    return math.inf if result.status is SiteStatus.FAIL and excess <= 1.0 else excess


def give_fields(comparison: Comparison, layer: int) -> dict[str, Any]:
    """Return the fields of a `Case` that are the verdict on a layer: what fails, warns and is blamed, and why."""
    sites = comparison.of_layer(layer)
    failed = [site for site in sites if site.status is SiteStatus.FAIL]
    blames = [blame for blame in comparison.blame if blame.layer == layer]
    reasons = [*(blame.reason for blame in blames), *(site.reason for site in failed), ""]
    return {
        "failed": tuple(site.site for site in failed),
        "warned": tuple(site.site for site in sites if site.status is SiteStatus.WARN),
        "blamed": tuple(blame.sites for blame in blames),
        "reason": reasons[0],
        "excess": {site.site: _measure_excess(site) for site in sites},
    }


def hide_sites(capture: Capture, hidden: Collection[Site]) -> Capture:
    """Return the capture without some sites of its layers; sites outside the layers stay."""
    names = {str(site) for site in hidden}
    manifest = replace(
        capture.manifest,
        entries=tuple(
            entry for entry in capture.manifest.entries if entry.layer is None or entry.site not in names
        ),
        not_exposed={
            layer: tuple(
                site
                for site in capture.description.run.sites
                if site is not Site.INPUT and (site in hidden or site in capture.not_exposed(layer))
            )
            for layer in capture.layers
        },
    )
    return Capture(capture.directory, manifest)


def as_black_box(capture: Capture) -> Capture:
    """Return the capture of the same port as a black box."""
    return hide_sites(
        capture, [site for site in capture.graph.sites if site not in (Site.INPUT, Site.OUTPUT)]
    )


def name_mistake(
    baseline: Baseline, capture: Capture, layer: int
) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Diagnose a layer by its output alone: the mistakes that explain it, with their parameters, best first."""
    diagnosis = diagnose(baseline.golden, as_black_box(capture), model=baseline.folder, layers=(layer,))
    return tuple((finding.mistake, dict(finding.parameters)) for finding in diagnosis.findings)
