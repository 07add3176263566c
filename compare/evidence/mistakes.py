"""Mistakes of a diagnosis, as a report shows them: each place with what was tried there, what leaves least first."""

from __future__ import annotations

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, SiteDiagnosis
from reports.page.diagnosed import DiagnosedPlace, DiagnosedRun, TriedMistake
from reports.wording import word_layer, word_place


def word_diagnosis(diagnosis: Diagnosis) -> DiagnosedRun:
    """Return a diagnosis as plain values, sites outside the layers last."""
    return DiagnosedRun(
        places=(
            *(_place(layer, word_layer(layer.layer)) for layer in diagnosis.layers),
            *(_place(site, str(site.site)) for site in diagnosis.sites),
        ),
        unexplained=tuple(
            f"{word_place(blame.layer, blame.sites)}: {blame.reason}" for blame in diagnosis.unexplained_blame
        ),
        notes=diagnosis.notes,
    )


def _place(part: LayerDiagnosis | SiteDiagnosis, name: str) -> DiagnosedPlace:
    # Of a right part the nearest mistakes explain nothing.
    nearest = () if part.is_right else part.nearest
    return DiagnosedPlace(
        place=name,
        unexplained=part.unexplained,
        is_right=part.is_right,
        mistakes=(
            *(_mistake(finding, is_named=True) for finding in part.named),
            *(_mistake(finding, is_named=False) for finding in nearest),
        ),
        num_hypotheses=part.num_hypotheses,
        notes=part.notes,
    )


def _mistake(finding: MistakeFinding, *, is_named: bool) -> TriedMistake:
    return TriedMistake(
        name=finding.mistake,
        parameters=", ".join(f"{name} {_word(value)}" for name, value in finding.parameters.items()),
        is_named=is_named,
        leaves=finding.leaves,
        explains=finding.explains,
        what=finding.what,
        look_at=finding.look_at,
        sources=finding.sources,
        proof="" if finding.proof is None else f"Undone in the port: {finding.proof.outcome}.",
    )


def _word(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
