"""Findings in a whole port's run: made of the catalogue's words, and joined to a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compare.blame.blame import group_blame
from compare.catalogue.words import Place, words_of
from minimax_tools.results.results import Blame, Comparison, ModelFinding, Verdict


def named_finding(
    mistake: str,
    *,
    number: int | None,
    layer: int | None = None,
    site: str,
    reason: str,
    parameters: Mapping[str, Any] | None = None,
    place: Place = Place.RUN,
) -> ModelFinding:
    """Return the finding that a known mistake explains."""
    words = words_of(mistake, place)
    return ModelFinding(
        number=number,
        layer=layer,
        sites=(site,),
        reason=reason,
        mistake=mistake,
        what=words.what,
        look_at=words.look_at,
        parameters=dict(parameters or {}),
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


def join_verdicts(verdict: Verdict, findings: Sequence[ModelFinding]) -> Verdict:
    """Return a verdict with more findings: fail if one does not warn."""
    if any(not finding.is_warning for finding in findings):
        return Verdict.FAIL
    return Verdict.WARN if findings and verdict is Verdict.PASS else verdict
