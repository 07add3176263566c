"""Model faults: all findings in a whole port's run, what came first at the front."""

from __future__ import annotations

from collections.abc import Sequence

from compare.model_runs.choices import judge_choices
from compare.model_runs.classes import judge_classes
from compare.model_runs.layer_order import LAYER_SKIPPED, judge_layer_order
from compare.model_runs.repeated import judge_repetitions
from compare.parts import ComparedPart
from compare.sides.pairing import declared_layers
from compare.sides.sides import Sides
from minimax_tools.results.model_findings import ModelFinding


def find_model_faults(
    sides: Sides, embedding: ComparedPart, layers: Sequence[ComparedPart], head: ComparedPart
) -> tuple[ModelFinding, ...]:
    """Gather the findings of a whole port's run: wrong sites by pass, order of layers, chosen tokens; () otherwise."""
    passes = sides.target.read_passes()
    if passes is None:
        return ()
    classes = judge_classes(passes)
    order = judge_layer_order(sides, len(declared_layers(sides.target)))
    # A layer that never ran lacks all its sites: its own finding says why.
    skipped = {finding.layer for finding in order if finding.mistake == LAYER_SKIPPED}
    parts = [embedding, *(part for part in layers if part.layer not in skipped), head]
    findings = [*order, *judge_choices(sides), *judge_repetitions(sides)]
    findings += [finding for part in parts for finding in _of_sites(part)]
    findings += [finding for part in parts for finding in part.cache.findings]
    findings += [] if classes is None else [classes]
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
