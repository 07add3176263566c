"""Chunks: a whole port's run in passes of several tokens behind a cache, judged, and joined to that of its steps.

What the steps' run shows is not said again of the chunks: what is wrong in a layer there is wrong in chunks too, and so
is a port whose prompts depend on what ran before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compare.blame.blame import group_blame
from compare.model_runs.repeated import REPEATED
from minimax_tools.capture.source import CaptureSource
from minimax_tools.results.model_findings import ModelFinding
from minimax_tools.results.results import Blame, ChunkedRun, Comparison, Verdict

_OLDER = "the run beside which they lie is another one"


def open_chunks(target: CaptureSource, *, has_weights: bool) -> CaptureSource | ChunkedRun | None:
    """Open a run's chunks, or say why they are not judged; None if the run is no whole port's.

    Raises:
        CaptureError: Their capture is damaged.
    """
    chunks = target.read_chunks()
    if target.read_passes() is None or chunks is None:
        return None
    passes, run, beside = chunks.read_passes(), target.description, chunks.description
    if passes is None or not chunks.is_complete:
        return ChunkedRun(untested="their run did not come to its end")
    if passes.untested:
        return ChunkedRun(untested=passes.untested)
    if (run.inputs_digest, run.provenance.target_digest) != (
        beside.inputs_digest,
        beside.provenance.target_digest,
    ):
        return ChunkedRun(untested=_OLDER)
    return (
        chunks
        if has_weights
        else ChunkedRun(untested="they are judged with the checkpoint alone: --model DIR")
    )


def join_chunks(run: Comparison, chunks: Comparison, capture: CaptureSource) -> Comparison:
    """Join the judgement of the chunks to that of the run beside which they lie; `capture` is theirs."""
    passes = capture.read_passes()
    assert passes is not None, "chunks are passes"
    findings = tuple(
        replace(finding, in_chunks=True) for finding in chunks.findings if not _is_shown(finding, run)
    )
    places = {(finding.layer, site) for finding in findings for site in finding.sites}
    blame = tuple(
        replace(blamed, in_chunks=True, reason=f"in chunks, {blamed.reason}")
        for blamed in chunks.blame
        if places & {(blamed.layer, site) for site in blamed.sites}
    )
    groups = tuple(
        replace(group, reason=f"in chunks, {group.reason}")
        for group in chunks.blame_groups
        if places & {(layer, site) for layer in group.layers for site in group.sites}
    )
    widths = tuple(max(sizes) for sizes in passes.chunks)
    return replace(
        run,
        verdict=join_verdicts(run.verdict, findings),
        findings=(*run.findings, *findings),
        blame=(*run.blame, *blame),
        blame_groups=(*run.blame_groups, *groups),
        chunks=ChunkedRun(widths=widths, compared=chunks.compared, of=chunks.of),
    )


def blame_findings(findings: Sequence[ModelFinding]) -> tuple[Blame, ...]:
    """Return a blame for each finding that no site shows, and that does not warn."""
    return tuple(
        Blame(layer=finding.layer, sites=finding.sites, reason=finding.reason)
        for finding in findings
        if not (finding.is_of_sites or finding.is_warning)
    )


def add_findings(comparison: Comparison, findings: tuple[ModelFinding, ...]) -> Comparison:
    """Return a comparison with more findings, which are to blame unless they warn."""
    blame = blame_findings(findings)
    return replace(
        comparison,
        findings=tuple(sorted((*comparison.findings, *findings), key=lambda finding: finding.order)),
        blame=(*comparison.blame, *blame),
        blame_groups=(*comparison.blame_groups, *group_blame(blame, ())),
    )


def _is_shown(finding: ModelFinding, run: Comparison) -> bool:
    """Decide whether the run shows what is wrong in chunks: a wrong layer, or a wrong site outside the layers."""
    return any(
        REPEATED in shown.sites
        or (
            shown.layer == finding.layer
            and (finding.layer is not None or set(shown.sites) & set(finding.sites))
        )
        for shown in run.findings
    )


def join_verdicts(verdict: Verdict, findings: Sequence[ModelFinding]) -> Verdict:
    """Return a verdict with more findings: fail if one does not warn."""
    if any(not finding.is_warning for finding in findings):
        return Verdict.FAIL
    return Verdict.WARN if findings and verdict is Verdict.PASS else verdict
