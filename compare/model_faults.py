"""Model faults: all findings in a whole port's run, what came first at the front."""

from __future__ import annotations

from collections.abc import Sequence

from compare.model_runs.choices import judge_choices
from compare.model_runs.layer_order import judge_layer_order
from compare.parts import ComparedPart
from compare.sides.pairing import declared_layers
from compare.sides.sides import Sides
from minimax_tools.results.model_findings import ModelFinding


def find_model_faults(
    sides: Sides, embedding: ComparedPart, layers: Sequence[ComparedPart], head: ComparedPart
) -> tuple[ModelFinding, ...]:
    """Gather the findings of a whole port's run: wrong sites by pass, order of layers, chosen tokens; () otherwise."""
    if sides.target.read_passes() is None:
        return ()
    findings = [finding for part in (embedding, *layers, head) for finding in _of_sites(part)]
    findings += judge_layer_order(sides, len(declared_layers(sides.target)))
    findings += judge_choices(sides)
    return tuple(sorted(findings, key=lambda finding: finding.order))


def _of_sites(part: ComparedPart) -> list[ModelFinding]:
    """Return the blamed sites of a part, with the pass in which they are wrong first."""
    fault = part.fault
    blame = part.blame if fault is None else fault.blame
    return [
        ModelFinding(
            number=None if fault is None else fault.number,
            layer=part.layer,
            sites=blamed.sites,
            reason=blamed.reason,
            is_of_sites=True,
        )
        for blamed in blame
    ]
