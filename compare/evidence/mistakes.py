"""A diagnosis in words, as a report shows it: the same places and sentences as in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compare.diagnosis.finding import Diagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.layer_group import LayerGroup, gather_alike
from compare.diagnosis.proof.proof import (
    MEND_FIRST,
    PROVE_THE_PLACE,
    proved_edits,
    word_lines_place,
    word_proofs,
)
from compare.diagnosis.report import (
    NOT_OF_SHAPE,
    WRONG_WEIGHTS,
    parts_of,
    untold_blame,
    word_headline,
    word_method,
    word_mistake,
    word_notes,
    word_passed_over,
    word_place_of_fault,
    word_range,
    word_right_sites,
    word_shape_outcome,
    word_suspects,
    word_what,
    word_where,
)
from minimax_tools.model.sites import FORMULAS
from minimax_tools.model.span import word_layers
from reports.page.evidence import DiagnosedPlace, DiagnosedRun, TriedMistake
from reports.wording import word_figure, word_layer


def word_diagnosis(diagnosis: Diagnosis) -> DiagnosedRun:
    """Return a diagnosis in words: the groups of layers and the sites outside them, in the model's order."""
    parts = parts_of(diagnosis)
    return DiagnosedRun(
        headline=f"{str(diagnosis.verdict).upper()}: {word_headline(diagnosis, parts)}",
        places=(
            *(
                _layers(part, diagnosis) if isinstance(part, LayerGroup) else _wrong_site(part)
                for part in parts
            ),
            *_right_sites(diagnosis),
            *_not_diagnosed(diagnosis),
        ),
        notes=(*diagnosis.notes, *_advice(diagnosis)),
    )


def _layers(group: LayerGroup, diagnosis: Diagnosis) -> DiagnosedPlace:
    before = word_range(layer.unexplained for layer in group.diagnoses)
    is_single = len(group.diagnoses) == 1
    lies: tuple[str, ...] = ()
    # Of right layers the nearest mistakes explain nothing.
    mistakes: tuple[TriedMistake, ...] = ()
    if group.named:
        leaves = word_range(finding.leaves for finding in group.named)
        matches = "matches" if is_single else "match"
        outcome = f"{matches} {word_mistake(group.named)}: leaves ρ {leaves} of {before}"
        mistakes = tuple(
            _mistake(findings, group, is_named=True) for findings in (group.named, *group.others)
        )
    elif group.is_right:
        outcome = f"nothing to explain (ρ {before})"
    elif group.is_of_shape:
        outcome = word_shape_outcome(group)
    else:
        unnamed = f"no known mistake explains {'it' if is_single else 'them'}"
        outcome = f"{WRONG_WEIGHTS if group.is_of_weights else unnamed} (ρ {before})"
        lies = (
            *(sentence for cause in group.causes for sentence in word_place_of_fault(cause)),
            *word_passed_over(group, diagnosis),
        )
        mistakes = tuple(_nearest(group))
    return DiagnosedPlace(
        place=word_layers(group.numbers),
        outcome=outcome,
        is_right=group.is_right,
        lies=lies,
        mistakes=mistakes,
        method=NOT_OF_SHAPE if group.is_of_shape else word_method(group),
        notes=word_notes(group),
    )


def _nearest(group: LayerGroup) -> Iterator[TriedMistake]:
    """Yield the mistakes that came nearest in some layer of a group, what leaves least first."""
    gathered = gather_alike(finding for layer in group.diagnoses for finding in layer.nearest)
    for findings in sorted(gathered, key=lambda alike: min(finding.leaves for finding in alike)):
        yield _mistake(findings, group, is_named=False)


def _wrong_site(site: SiteDiagnosis) -> DiagnosedPlace:
    before = word_figure(site.unexplained)
    tried = [(finding, True) for finding in site.named] or [(finding, False) for finding in site.nearest]
    if site.named:
        first = site.named[0]
        outcome = f"matches {word_mistake([first])}: leaves ρ {word_figure(first.leaves)} of {before}"
    else:
        outcome = f"no known mistake explains it (ρ {before})"
    return DiagnosedPlace(
        place=str(site.site),
        outcome=outcome,
        is_right=False,
        lies=() if site.named else (f"Original: {site.site} = {FORMULAS[site.site]}",),
        mistakes=tuple(_mistake([finding], None, is_named=is_named) for finding, is_named in tried),
        method=f"{site.num_hypotheses} hypotheses tried on the port's own input",
        notes=site.notes,
    )


def _right_sites(diagnosis: Diagnosis) -> Iterator[DiagnosedPlace]:
    place, _, outcome = word_right_sites(diagnosis).partition(": ")
    if place:
        yield DiagnosedPlace(place=place, outcome=outcome, is_right=True)


def _not_diagnosed(diagnosis: Diagnosis) -> Iterator[DiagnosedPlace]:
    for cause in untold_blame(diagnosis):
        yield DiagnosedPlace(
            place=", ".join((word_layer(cause[0].layer), word_suspects(cause))),
            outcome="not diagnosed",
            is_right=False,
            lies=word_place_of_fault(cause),
        )


def _advice(diagnosis: Diagnosis) -> tuple[str, ...]:
    proofs = [finding.proof for finding in diagnosis.findings if finding.proof is not None]
    return (MEND_FIRST,) if any(proof.is_proved for proof in proofs) else ()


def _mistake(findings: Sequence[MistakeFinding], group: LayerGroup | None, *, is_named: bool) -> TriedMistake:
    """Return a mistake as it was tried on some layers of a group, or on one site outside the layers."""
    first = findings[0]
    return TriedMistake(
        name=first.mistake,
        parameters=word_mistake(findings).removeprefix(first.mistake).strip(" ()"),
        is_named=is_named,
        leaves=word_range(finding.leaves for finding in findings),
        explains=word_range(
            (100 * finding.explains for finding in findings), word=lambda value: f"{value:.1f}"
        ),
        what=word_what(findings),
        look_at=first.look_at,
        layers="" if group is None else word_where(findings, group).strip(),
        sources=first.sources,
        proof=word_proofs(findings),
        edits=tuple(
            "\n".join(
                (
                    f"# {word_lines_place(has_conversion=edit.has_conversion)}",
                    *edit.lines,
                    f"# {PROVE_THE_PLACE}",
                )
            )
            for edit in proved_edits(findings)
        ),
    )
