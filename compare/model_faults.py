"""Model faults: all findings in a whole port's run, what came first at the front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compare.model_runs.choices import judge_choices
from compare.model_runs.classes import judge_classes
from compare.model_runs.layer_order import LAYER_SKIPPED, judge_layer_order
from compare.model_runs.repeated import judge_repetitions
from compare.model_runs.stream import judge_norm_input
from compare.parts import ComparedPart
from compare.sides.pairing import declared_layers
from compare.sides.sides import Sides
from minimax_tools.model.sites import ModelSite
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


def without_norm(
    sides: Sides, head: ComparedPart, *, last_layer: int
) -> tuple[ComparedPart, tuple[ModelFinding, ...]]:
    """Return the head without blame, and a finding, if its norm is wrong because of what it is given."""
    is_blamed = any(str(ModelSite.FINAL_NORM) in blame.sites for blame in head.blame)
    if not is_blamed or sides.weights is None or sides.target.read_passes() is None:
        return head, ()
    number = 0 if head.fault is None else head.fault.number
    with sides.weights.open_head(sides.reference) as weights:
        found = judge_norm_input(sides, weights, last_layer=last_layer, number=number)
    return (head, ()) if found is None else (replace(head, blame=(), fault=None), (found,))


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
