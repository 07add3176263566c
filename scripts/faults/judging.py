"""Judging: what mm2 says of a capture, layer by layer, with all sites shown and with the output alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from compare.comparer import compare_captures
from compare.criteria import DEFAULT_ATOL, DEFAULT_RTOL
from compare.judge import Criteria
from compare.weights import CheckpointWeights
from faults.scene import Scene
from minimax_tools.capture.reader import Capture
from minimax_tools.results import Comparison, SiteStatus
from minimax_tools.sites import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVerdict:
    """What was said of one layer.

    Args:
        failed: Sites that fail.
        warned: Sites that warn.
        blamed: The sets of sites that are to blame, in execution order.
        reason: Of the first blame, or of the first failure.
    """

    failed: tuple[str, ...]
    warned: tuple[str, ...]
    blamed: tuple[tuple[str, ...], ...]
    reason: str

    @property
    def is_detected(self) -> bool:
        """Whether the layer is said to be wrong."""
        return bool(self.failed or self.blamed)


def judge_layers(scene: Scene, capture: Capture) -> Mapping[int, LayerVerdict]:
    """What mm2 says by its default criteria and with the model at hand, as mm2-test does, by layer."""
    criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
    comparison = compare_captures(
        scene.golden,
        capture,
        criteria=criteria,
        layer_pattern="layer_*",
        weights=CheckpointWeights(model=str(scene.folder)),
    )
    return {layer: _verdict(comparison, layer) for layer in comparison.layers}


def as_black_box(capture: Capture) -> Capture:
    """The same capture of a port that shows its output and nothing else."""
    shown = {str(Site.INPUT), str(Site.OUTPUT)}
    hidden = tuple(site for site in capture.description.run.sites if str(site) not in shown)
    manifest = replace(
        capture.manifest,
        entries=tuple(entry for entry in capture.manifest.entries if entry.site in shown),
        not_exposed=dict.fromkeys(capture.layers, hidden),
    )
    return Capture(capture.directory, manifest)


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
    )
