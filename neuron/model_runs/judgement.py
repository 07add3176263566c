"""Judgement of a whole port's run beyond its sites: a port that shows no layer, and the name of what is wrong first.

The logits of a port that shows no layer carry the noise of all layers, which no golden holds. So right models that
round are computed through all layers (`golden_logits`): their distance from the exact model is the noise of a right
port, token by token. In float32 noise does not grow from layer to layer: there one limit holds for each token.

A layer that is wrong in the prefill runs isolated, on the golden's input, inside the port as it is, and the mistake is
named from that run. A site outside the layers is named from the whole run. T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compare.comparer import JudgedRun, judge_run
from compare.diagnosis.decoding import diagnose_decoding
from compare.diagnosis.diagnose import diagnose_run
from compare.diagnosis.finding import Diagnosis, MistakeFinding, confirm_causes
from compare.limits.criteria import Criteria
from compare.model_runs.findings import add_findings, join_verdicts
from compare.model_runs.passes import split_passes
from compare.prompts.logits_verdict import LogitsVerdict, RowLogits, judge_rows
from compare.sides.golden_weights import WeightSource
from compare.sides.sides import Batch
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.golden_logits.golden_rows import GoldenRows
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.results.prompt_results import word_flipped
from minimax_tools.results.results import Comparison, ModelFinding, SiteResult, SiteStatus, Verdict
from neuron.model_runs.model_runner import ModelRun

_LOGITS = str(ModelSite.LOGITS)
_NOTE = "the port shows no layer: its logits alone were judged, by {}; a faint mistake passes"
_MODELS = "the noise of right models through all layers"
# Share of the tokens that may be off in float32: two experts may be nearer to each other than float32 noise.
_MOST_FLIPPED = 0.1


def judge_black_box(
    comparison: Comparison,
    golden: CaptureSource,
    capture: CaptureSource,
    *,
    reader: CheckpointReader,
    spec: ModelSpec,
    folder: Path,
) -> Comparison:
    """Judge the logits of a run whose comparison could not; `folder` keeps golden logits from run to run."""
    rows = capture.read_inputs().real_rows()
    verdict = judge_rows(
        rows,
        [_read_logits(capture, row) for row in range(len(rows))],
        GoldenRows.open(folder, reader=reader, spec=spec, golden=golden),
        num_decoded=capture.description.run.num_decoded,
        through="all layers",
    )
    return _conclude(comparison, verdict)


def judge_in_float32(judged: JudgedRun) -> Comparison:
    """Judge the logits of a float32 run whose comparison could not, against the golden's own."""
    sides, split = judged.sides, split_passes(judged.sides)
    assert split is not None, "a whole port has passes"
    # What float32 costs each layer, and the head.
    limit = sides.criteria.noise.float32 * (1 + len(judged.comparison.layers))
    by = f"a limit of {limit:.2g} of their norm, as float32 has it"
    golden, port = (side.read(None, ModelSite.LOGITS).double() for side in (sides.reference, sides.target))
    held = sides.target.held_tokens(ModelSite.LOGITS)
    errors = (port - golden).norm(dim=-1) / golden.norm(dim=-1)  # [B,S]
    is_held = torch.ones_like(split.numbers, dtype=torch.bool) if held is None else held
    is_wrong = is_held & ~(errors <= limit)

    def share_wrong(batch: Batch) -> float:
        num_held = int(batch.tokens(is_held).sum())
        return int(batch.tokens(is_wrong).sum()) / num_held if num_held else 0.0

    # A step has a token of each prompt, so steps are judged together.
    phases = [split.prefill, *([] if split.decoded is None else [split.decoded] * len(split.steps))]
    for number, (phase, batch) in enumerate(zip(phases, (split.prefill, *split.steps), strict=True)):
        if share_wrong(phase) > _MOST_FLIPPED and share_wrong(batch) > _MOST_FLIPPED:
            reason = (
                f"{100 * share_wrong(batch):.0f} % of its tokens have logits that are off by more than {limit:.2g} of "
                f"their norm, up to {float(batch.tokens(errors).max()):.3g}"
            )
            verdict = LogitsVerdict(excess=float(errors.max()) / limit, first_pass=number, reason=reason)
            return _conclude(judged.comparison, verdict, by=by)
    return _conclude(judged.comparison, LogitsVerdict(excess=0.0, first_pass=None, reason=""), by=by)


def _read_logits(capture: CaptureSource, row: int) -> RowLogits:
    """Read the logits that the run holds of a row."""
    is_real = capture.read_inputs().attention_mask[row].bool()
    held = capture.held_tokens(ModelSite.LOGITS)
    is_held = torch.ones_like(is_real) if held is None else held[row]
    logits = capture.read(None, ModelSite.LOGITS)[row]
    return RowLogits(tokens=is_held[is_real].nonzero().flatten(), logits=logits[is_real & is_held])


def _conclude(comparison: Comparison, verdict: LogitsVerdict, *, by: str = _MODELS) -> Comparison:
    """Put the judgement of the logits into the comparison; `by` says what judged them."""
    is_told = any(_LOGITS in finding.sites and not finding.in_chunks for finding in comparison.findings)
    status = SiteStatus.PASS
    if verdict.first_pass is not None:
        status = SiteStatus.FAIL
        found = () if is_told else (_describe(verdict.first_pass, verdict.reason),)
        comparison = add_findings(comparison, found)
    flipped = word_flipped(verdict.num_flipped)
    return replace(
        comparison,
        verdict=join_verdicts(Verdict.PASS, comparison.findings),
        sites=tuple(_with_verdict(site, status, verdict) for site in comparison.sites),
        notes=(_NOTE.format(by), *((flipped,) if flipped else ()), *comparison.notes),
    )


def _describe(number: int, reason: str) -> ModelFinding:
    return ModelFinding(
        number=number,
        layer=None,
        sites=(_LOGITS,),
        reason=reason,
        look_at="its layers: show them by `sites`, run one by mm2-test sweep, or, if the port is compiled "
        "whole, replace its stream by mm2-test replacement",
    )


def _with_verdict(site: SiteResult, status: SiteStatus, verdict: LogitsVerdict) -> SiteResult:
    """Return the logits' result with the verdict, and with the noise of all layers in place of the head's alone."""
    if site.site != _LOGITS or site.layer is not None:
        return site
    logits = site.logits
    if logits is not None and verdict.noise is not None:
        mean, percentile = verdict.noise
        logits = replace(
            logits,
            kl_mean_foreseen=mean,
            kl_p95_foreseen=percentile,
            num_explained=max(logits.num_disagreeing - verdict.num_choices, 0),
            worst_choices=(),
        )
    return replace(site, status=status, reason=verdict.reason, logits=logits)


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
