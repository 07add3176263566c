"""Confirmed causes: two sites of one operation that one named mistake explains are one cause.

The comparison joins such sites only if they are wrong alike. A mistake that begins at both tells it for sure, even
where their errors differ: a norm over a rank's own heads is further off for queries than for keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compare.blame.blame import group_blame
from compare.blame.operations import join_findings, join_operation
from compare.comparer import JudgedRun
from compare.diagnosis.finding import Diagnosis, MistakeFinding
from minimax_tools.model.sites import SHARED_OPERATIONS, Site
from minimax_tools.results.results import Comparison


def confirm_causes(run: JudgedRun, diagnosis: Diagnosis) -> Comparison:
    """Return a run's comparison, in which the sites that one named mistake explains are one cause."""
    comparison = run.comparison
    blame = comparison.blame
    for operation, sites in SHARED_OPERATIONS.items():
        explained = [layer.layer for layer in diagnosis.layers if _begins_at(layer.named[:1], sites)]
        blame = join_operation(blame, operation, explained)
    if blame == comparison.blame:
        return comparison
    return replace(
        comparison,
        blame=blame,
        blame_groups=group_blame(blame, (*comparison.sites, *run.recomputed)),
        findings=join_findings(comparison.findings, blame),
    )


def _begins_at(named: Sequence[MistakeFinding], sites: tuple[Site, Site]) -> bool:
    """Decide whether one of the mistakes of a finding begins at both sites of an operation."""
    return any(set(sites) <= set(begins) for finding in named for begins in finding.begins_at)
