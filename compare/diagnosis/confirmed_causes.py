"""Confirmed causes: two sites of one operation that one named mistake explains are one cause.

The comparison joins such sites only if they are wrong alike. A mistake that explains a layer at both sites tells it for
sure, even where their errors differ: a norm over a rank's own heads is further off for queries than for keys.
"""

from __future__ import annotations

from dataclasses import replace

from compare.blame.blame import group_blame
from compare.blame.operations import join_findings, join_operation
from compare.comparer import JudgedRun
from compare.diagnosis.catalogue.catalogue import CATALOGUE
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis
from minimax_tools.model.sites import SHARED_OPERATIONS
from minimax_tools.results.results import Comparison


def confirm_causes(run: JudgedRun, diagnosis: Diagnosis) -> Comparison:
    """Return a run's comparison, in which the sites that one named mistake explains are one cause."""
    comparison = run.comparison
    blame = comparison.blame
    for operation, sites in SHARED_OPERATIONS.items():
        explained = [
            layer.layer
            for layer in diagnosis.layers
            if _has_one_mistake(layer) and set(sites) <= set(layer.sites)
        ]
        blame = join_operation(blame, operation, explained)
    if blame == comparison.blame:
        return comparison
    return replace(
        comparison,
        blame=blame,
        blame_groups=group_blame(blame, (*comparison.sites, *run.recomputed)),
        findings=join_findings(comparison.findings, blame),
    )


def _has_one_mistake(layer: LayerDiagnosis) -> bool:
    """Decide whether the best explanation of a layer is one mistake, rather than two together."""
    return bool(layer.named) and layer.named[0].mistake in CATALOGUE
