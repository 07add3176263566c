"""Naming: what is wrong first in a whole port's run gets its name, from the suspect part alone.

A layer that is wrong in the prefill runs isolated, on the golden's input, inside the port as it is. The mistake is
named from that run. A site outside the layers is named from the whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compare.comparer import JudgedRun, judge_run
from compare.diagnosis.diagnose import diagnose_run
from compare.diagnosis.finding import Diagnosis, MistakeFinding, confirm_causes
from compare.limits.criteria import Criteria
from compare.model_runs.decoding import diagnose_decoding
from compare.sides.golden_weights import WeightSource
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import TargetError
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Comparison, ModelFinding
from neuron.model_runs.model_runner import ModelRun


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A whole port's run, judged, with the suspect layer's isolated run and the names that were found."""

    comparison: Comparison  # its findings have the names
    isolated: Comparison | None = None  # the suspect layer alone; None if no layer is suspect
    diagnosis: Diagnosis | None = None  # of the suspect layer, or of the sites outside the layers
    note: str = ""  # why the suspect layer did not run isolated


def name_first(
    run: JudgedRun, model: ModelRun, *, weights: WeightSource, criteria: Criteria, directory: Path
) -> NamedRun:
    """Name what is wrong first in a run, where its finding has no name yet.

    Args:
        run: The run, judged.
        model: The port, still in memory.
        weights: The golden's weights.
        criteria: Limits of the isolated run.
        directory: Folder of the isolated run's capture.

    Raises:
        IncomparableError, CheckpointError: As for `judge_run`.
    """
    comparison = run.comparison
    first = next(iter(comparison.findings), None)
    if first is None or first.mistake is not None or not first.is_of_sites:
        return NamedRun(comparison=comparison)
    if first.layer is None:
        diagnosis = diagnose_run(run, weights=weights, layers=())
        return NamedRun(comparison=_with_name(comparison, first, diagnosis.findings), diagnosis=diagnosis)
    if first.number:
        named = _name_behind_cache(run, first, layer=first.layer)
        if named is not None:
            return NamedRun(comparison=replace(comparison, findings=(named, *comparison.findings[1:])))
    if first.in_chunks:
        # Alone the layer would run in the prefill, in which it is right.
        return NamedRun(comparison=comparison)
    try:
        model.capture_layer(first.layer, directory)
    except TargetError as error:
        return NamedRun(comparison=comparison, note=str(error))
    isolated = judge_run(
        run.sides.reference,
        Capture.open(directory),
        criteria=criteria,
        layer_pattern=f"layer_{first.layer}",
        weights=weights,
    )
    diagnosis = diagnose_run(isolated, weights=weights, includes_outside=False)
    named_run = replace(run, comparison=_with_name(comparison, first, diagnosis.findings))
    return NamedRun(
        comparison=confirm_causes(named_run, diagnosis),
        isolated=isolated.comparison,
        diagnosis=diagnosis,
    )


def _name_behind_cache(run: JudgedRun, first: ModelFinding, *, layer: int) -> ModelFinding | None:
    """Name what is wrong in a pass behind a cache, where the first pass is right; None if nothing known explains it.

    What the layer reads of its cache, or thinks of its positions, is in question.
    """
    wrong = run.chunks if first.in_chunks else run
    assert wrong is not None, "what is found in chunks was judged in chunks"
    blamed = [
        Site(site)
        for finding in run.comparison.findings
        if finding.is_of_sites and finding.order == first.order
        for site in finding.sites
    ]
    decoded = diagnose_decoding(wrong.sides, layer, number=first.number or 0, blamed=blamed)
    if not decoded:
        return None
    reason = f"{first.reason}; {decoded[0].reason}"
    return replace(decoded[0], sites=first.sites, reason=reason, in_chunks=first.in_chunks)


def _with_name(comparison: Comparison, first: ModelFinding, named: Sequence[MistakeFinding]) -> Comparison:
    """Give the first finding the name of the best mistake found at its layer; without one nothing changes."""
    best = next((mistake for mistake in named if mistake.layer == first.layer), None)
    if best is None:
        return comparison
    finding = replace(
        first,
        mistake=best.mistake,
        what=best.what,
        look_at=best.look_at,
        parameters={
            name: value for name, value in best.parameters.items() if isinstance(value, (int, float, str))
        },
    )
    return replace(comparison, findings=(finding, *comparison.findings[1:]))
