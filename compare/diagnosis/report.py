"""The report of a diagnosis, and the list of the catalogue, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compare.blame.blame import join_causes
from compare.diagnosis.catalogue.catalogue import CATALOGUE
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.layer_group import LayerGroup
from compare.diagnosis.mistake import Mistake
from compare.diagnosis.model.catalogue import MODEL_CATALOGUE
from compare.diagnosis.model.mistake import ModelMistake
from compare.diagnosis.proof.wording import MEND_FIRST, draw_proofs, word_outcomes
from compare.diagnosis.wording import (
    NOT_OF_SHAPE,
    WRONG_WEIGHTS,
    capitalise,
    formulas_of,
    parts_of,
    untold_blame,
    word_explanation,
    word_headline,
    word_lies_between,
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
from minimax_tools.model.formulas import FORMULAS
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import Blame
from reports.canvas import Canvas, Column, Row
from reports.json_values import to_json
from reports.wording import word_figure, word_layer, word_untested

# Mistakes that are listed of a group of layers.
_MOST_LISTED = 3
_NOTHING_TO_PROVE = "Nothing to prove: no mistake was named."


def diagnosis_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON: `diagnosis` lists the named mistakes, layers ascending, best first."""
    return {
        "verdict": str(diagnosis.verdict),
        "diagnosis": _mistake_records(diagnosis.findings),
        "layers": [
            {"layer": layer.layer, "sites": to_json(layer.sites), **_part_record(layer)}
            for layer in diagnosis.layers
        ],
        "sites": [{"site": str(site.site), **_part_record(site)} for site in diagnosis.sites],
        "weights": to_json(diagnosis.weights),
        "passed_over": to_json(diagnosis.passed_over),
        "unexplained_blame": [
            {**to_json(blame), "formulas": formulas_of(blame)} for blame in diagnosis.unexplained_blame
        ],
        "reference": diagnosis.reference,
        "target": diagnosis.target,
        "is_failed": diagnosis.is_failed,
        "notes": list(diagnosis.notes),
        "untested": to_json(diagnosis.untested),
    }


def render_diagnosis(
    diagnosis: Diagnosis,
    *,
    proves: bool = False,
    width: int | None = None,
    is_terminal: bool | None = None,
) -> str:
    """Render the diagnosis as text, the verdict first; see `reports.terminal.render_comparison`.

    With `proves`, proofs were asked for: it is said if there is nothing to prove.
    """
    canvas = Canvas(width=width, is_terminal=is_terminal)
    parts = parts_of(diagnosis)
    _draw_verdict(canvas, diagnosis, parts)
    if proves and not diagnosis.findings and not diagnosis.has_wrong_weights:
        canvas.line(_NOTHING_TO_PROVE)
    canvas.facts([("golden", diagnosis.reference), ("run", diagnosis.target)])
    _draw_weights(canvas, diagnosis)
    for part in parts:
        canvas.gap()
        if isinstance(part, LayerGroup):
            _draw_group(canvas, part, diagnosis)
        else:
            _draw_site(canvas, part)
    _draw_right_sites(canvas, diagnosis)
    _draw_unexplained(canvas, diagnosis)
    if diagnosis.notes:
        canvas.gap()
    for note in diagnosis.notes:
        canvas.item(note)
    if any(finding.proof is not None and finding.proof.is_proved for finding in diagnosis.findings):
        canvas.gap()
        canvas.line(MEND_FIRST, style="bold")
    untested = word_untested(diagnosis.untested)
    if diagnosis.verdict.is_passed and untested:
        canvas.gap()
        canvas.line(untested)
    return canvas.text


def render_nothing_to_prove(diagnosis: Diagnosis) -> str:
    """Render the answer to --prove where a diagnosis named nothing: its verdict, and the places of the mistakes."""
    canvas = Canvas(width=None, is_terminal=None)
    _draw_verdict(canvas, diagnosis, parts_of(diagnosis))
    _draw_weights(canvas, diagnosis)
    if not diagnosis.has_wrong_weights:
        canvas.line(_NOTHING_TO_PROVE)
    of_shape = [layer for layer in diagnosis.layers if layer.is_of_shape]
    told = {layer.layer for layer in of_shape}
    causes = [cause for cause in join_causes(diagnosis.unexplained_blame) if cause[0].layer not in told]
    places = dict.fromkeys(word_lies_between(cause) for cause in causes if cause[0].right)
    for place in places:
        canvas.paragraph(place)
    for note in dict.fromkeys(note for layer in of_shape for note in layer.notes):
        canvas.item(note)
    for note in diagnosis.notes:
        canvas.item(note)
    return canvas.text


def catalogue_record() -> dict[str, Any]:
    """Return the catalogue as JSON."""
    return {
        "mistakes": [
            {
                "mistake": mistake.name,
                "what": mistake.what,
                "look_at": mistake.look_at,
                "sources": list(mistake.sources),
            }
            for mistake in _catalogue()
        ]
    }


def render_catalogue() -> str:
    """Render the catalogue as a table."""
    canvas = Canvas(width=None, is_terminal=None)
    columns = [
        Column(title="mistake", is_text=True),
        Column(title="what the port does", is_text=True, is_broken=True),
    ]
    canvas.table(columns, [Row(cells=(mistake.name, mistake.what)) for mistake in _catalogue()])
    return canvas.text


def _mistake_records(findings: Sequence[MistakeFinding], *, are_hints: bool = False) -> list[dict[str, Any]]:
    """Return mistakes as JSON; `proof` is a key only where it was asked for."""
    records = []
    for finding in findings:
        record = {**to_json(finding), "is_hint": are_hints}
        if finding.proof is None:
            del record["proof"]
        records.append(record)
    return records


def _part_record(part: LayerDiagnosis | SiteDiagnosis) -> dict[str, Any]:
    return {
        "unexplained": to_json(part.unexplained),
        "is_explained": bool(part.named),
        "is_right": part.is_right,
        "nearest": _mistake_records(part.nearest, are_hints=True),
        "num_hypotheses": part.num_hypotheses,
        "notes": list(part.notes),
    }


def _catalogue() -> tuple[Mistake | ModelMistake, ...]:
    return (*CATALOGUE.values(), *MODEL_CATALOGUE.values())


def _draw_verdict(canvas: Canvas, diagnosis: Diagnosis, parts: Sequence[SiteDiagnosis | LayerGroup]) -> None:
    canvas.line(
        f"{str(diagnosis.verdict).upper()}: {word_headline(diagnosis, parts)}",
        style="bold red" if diagnosis.exit_code else "bold green",
    )


def _draw_weights(canvas: Canvas, diagnosis: Diagnosis) -> None:
    """Draw the wrong weights, which were seen: nothing is searched or proved there."""
    layers_of: dict[str, list[int | None]] = {}
    for blame in diagnosis.weights:
        layers_of.setdefault(blame.reason, []).append(blame.layer)
    for reason, layers in layers_of.items():
        canvas.gap()
        canvas.line(f"{capitalise(word_layers(layers))}: {WRONG_WEIGHTS}", style="bold")
        canvas.paragraph(reason)


def _draw_site(canvas: Canvas, site: SiteDiagnosis) -> None:
    """Draw a site that is wrong: the mistake that explains it, or what the original computes there."""
    before = word_figure(site.unexplained)
    if site.named:
        first, *others = site.named
        canvas.line(
            f"{site.site} matches {word_mistake([first])}: leaves ρ {word_figure(first.leaves)} of {before}",
            style="bold",
        )
        _draw_mistake(canvas, [first])
        draw_proofs(canvas, [first])
        if others:
            words = (
                f"{word_mistake([other])}, which leaves ρ {word_figure(other.leaves)}" for other in others
            )
            canvas.paragraph(f"Cannot be told from: {'; '.join(words)}.")
    else:
        canvas.line(f"{site.site}: no known mistake explains it (ρ {before})", style="bold")
        canvas.paragraph(f"Original: {site.site} = {FORMULAS[site.site]}")
    canvas.paragraph(f"{site.num_hypotheses} hypotheses tried on the port's own input")
    for note in site.notes:
        canvas.item(note)


def _draw_group(canvas: Canvas, group: LayerGroup, diagnosis: Diagnosis) -> None:
    """Draw a group of layers: the mistake that explains them, or the place of the one that nothing names."""
    where, is_single = capitalise(word_layers(group.numbers)), len(group.numbers) == 1
    before = word_range(layer.unexplained for layer in group.diagnoses)
    if group.named:
        leaves = word_range(finding.leaves for finding in group.named)
        matches = "matches" if is_single else "match"
        canvas.line(
            f"{where} {matches} {word_mistake(group.named)}: leaves ρ {leaves} of {before}", style="bold"
        )
        _draw_mistake(canvas, group.named)
        draw_proofs(canvas, group.named)
        _draw_look_alikes(canvas, group)
    elif group.is_right:
        canvas.line(f"{where}: nothing to explain (ρ {before})", style="bold")
    elif group.is_of_shape:
        canvas.line(f"{where}: {word_shape_outcome(group)}", style="bold")
        canvas.paragraph(NOT_OF_SHAPE)
        for note in word_notes(group):
            canvas.item(note)
        return
    else:
        them = "it" if is_single else "them"
        unnamed = WRONG_WEIGHTS if group.is_of_weights else f"no known mistake explains {them}"
        canvas.line(f"{where}: {unnamed} (ρ {before})", style="bold")
        for cause in group.causes:
            _draw_place(canvas, cause)
        for sentence in word_passed_over(group, diagnosis):
            canvas.paragraph(sentence)
    canvas.paragraph(word_method(group))
    for note in word_notes(group):
        canvas.item(note)


def _draw_place(canvas: Canvas, cause: Sequence[Blame]) -> None:
    """Draw the sites between which a mistake lies, and what the original computes there."""
    for sentence in word_place_of_fault(cause):
        canvas.paragraph(sentence)


def _draw_mistake(canvas: Canvas, named: Sequence[MistakeFinding]) -> None:
    """Draw a mistake from its findings, one for each layer: what the port does, where to look, how well it explains."""
    first = named[0]
    canvas.paragraph(word_what(named))
    canvas.paragraph(f"Look at {first.look_at}.")
    canvas.paragraph(word_explanation(named))
    if first.sources:
        canvas.paragraph(f"Seen in {', '.join(first.sources)}.")


def _draw_look_alikes(canvas: Canvas, group: LayerGroup) -> None:
    """Draw the mistakes that the captures of some layer cannot tell from the named one."""
    if not group.others:
        return
    words = [
        f"{word_mistake(other)}, which leaves ρ {word_range(finding.leaves for finding in other)}"
        f"{word_where(other, group)}{word_outcomes(other)}"
        for other in group.others[:_MOST_LISTED]
    ]
    hidden = len(group.others) - len(words)
    words += [f"{hidden} more"] if hidden else []
    canvas.paragraph(f"Cannot be told from: {'; '.join(words)}.")


def _draw_right_sites(canvas: Canvas, diagnosis: Diagnosis) -> None:
    """Draw one line for the right sites outside the layers, unless the whole run is right."""
    words = word_right_sites(diagnosis)
    if words:
        canvas.line(words)


def _draw_unexplained(canvas: Canvas, diagnosis: Diagnosis) -> None:
    """Draw what the comparison blames and no named mistake explains, if nothing above tells of it."""
    for cause in untold_blame(diagnosis):
        canvas.gap()
        place = ", ".join((word_layer(cause[0].layer), word_suspects(cause)))
        canvas.paragraph(f"{capitalise(place)}: not diagnosed", indent=0)
        _draw_place(canvas, cause)
