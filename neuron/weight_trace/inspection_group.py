"""InspectionGroup: layers whose inspections found the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minimax_tools.results.results import Verdict
from neuron.weight_trace.inspection import WeightInspection

_WORST_FIRST = (Verdict.FAIL, Verdict.WARN, Verdict.PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectionGroup:
    """Layers whose inspections have one verdict and the same findings."""

    layers: tuple[int, ...]  # the layers, ascending
    first: WeightInspection  # the inspection of the first of them


def group_inspections(inspections: Iterable[WeightInspection]) -> tuple[InspectionGroup, ...]:
    """Group layers that are alike; the worst verdict comes first, then the first layer.

    Figures are not compared: the generated weights differ from layer to layer. Of each group one inspection is kept,
    since its layouts hold a number for each element.
    """
    layers: dict[object, list[int]] = {}
    firsts: dict[object, WeightInspection] = {}
    for inspection in inspections:
        findings = (inspection.verdict, inspection.findings)
        layers.setdefault(findings, []).append(inspection.layer)
        firsts.setdefault(findings, inspection)
    groups = [
        InspectionGroup(layers=tuple(layers[findings]), first=first) for findings, first in firsts.items()
    ]
    return tuple(sorted(groups, key=lambda group: _WORST_FIRST.index(group.first.verdict)))
