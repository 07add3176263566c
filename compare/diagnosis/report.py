"""The report of a diagnosis and of a proof, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.proof import MEND_FIRST, PROVE_THE_PLACE, MistakeProof, word_lines_place, word_proof
from compare.diagnosis.view import formulas_of, word_diagnosis
from minimax_tools.model.sites import ModelSite
from reports.canvas import Canvas
from reports.data import to_json
from reports.page.evidence import DiagnosedPlace, TriedMistake
from reports.wording import word_untested

# Mistakes that are listed as alike, and edits, which may differ by a number from layer to layer.
_MOST_LISTED, _MOST_EDITS = 3, 3


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
            {**to_json(blame), "formulas": formulas_of(blame, diagnosis)}
            for blame in diagnosis.unexplained_blame
        ],
        "reference": diagnosis.reference,
        "target": diagnosis.target,
        "is_failed": diagnosis.is_failed,
        "notes": list(diagnosis.notes),
        "untested": to_json(diagnosis.untested),
    }


def _part_record(part: LayerDiagnosis | SiteDiagnosis) -> dict[str, Any]:
    return {
        "unexplained": to_json(part.unexplained),
        "is_explained": bool(part.named),
        "is_right": part.is_right,
        "nearest": _mistake_records(part.nearest, are_hints=True),
        "num_hypotheses": part.num_hypotheses,
        "notes": list(part.notes),
    }


def _mistake_records(findings: Sequence[MistakeFinding], *, are_hints: bool = False) -> list[dict[str, Any]]:
    """Return mistakes as JSON; `proof` is a key only where it was asked for."""
    records = []
    for finding in findings:
        record = {**to_json(finding), "is_hint": are_hints}
        if finding.proof is None:
            del record["proof"]
        records.append(record)
    return records


def render_diagnosis(
    diagnosis: Diagnosis,
    *,
    proves: bool = False,
    width: int | None = None,
    is_terminal: bool | None = None,
) -> str:
    """Render the diagnosis as text, the verdict first; see `reports.terminal.render_comparison`."""
    canvas = Canvas(width=width, is_terminal=is_terminal)
    run = word_diagnosis(diagnosis)
    canvas.line(run.headline, style="bold red" if diagnosis.exit_code else "bold green")
    if proves and not diagnosis.findings and not diagnosis.has_wrong_weights:
        canvas.line("Nothing to prove: no mistake was named.")
    canvas.facts([("golden", diagnosis.reference), ("run", diagnosis.target)])
    for place in run.places:
        if place.method or not place.is_right:
            canvas.gap()
        _draw_place(canvas, place)
    if diagnosis.notes:
        canvas.gap()
    for note in diagnosis.notes:
        canvas.item(note)
    if MEND_FIRST in run.notes:
        canvas.gap()
        canvas.line(MEND_FIRST, style="bold")
    untested = word_untested(diagnosis.untested)
    if diagnosis.verdict.is_passed and untested:
        canvas.gap()
        canvas.line(untested)
    return canvas.text


def render_proof(proof: MistakeProof, *, layer: int, undone: str) -> str:
    """Render the proof of one layer as text; `undone` words the mistakes."""
    canvas = Canvas()
    canvas.line(f"Layer {layer} without {undone}: {proof.outcome}", style="bold")
    for sentence in word_proof(proof):
        canvas.paragraph(sentence)
    if proof.is_proved:
        if proof.lines:
            place = word_lines_place(has_conversion=proof.has_conversion)
            _draw_edit(canvas, place, proof.lines, PROVE_THE_PLACE)
        canvas.line(MEND_FIRST, style="bold")
    return canvas.text


def _draw_place(canvas: Canvas, place: DiagnosedPlace) -> None:
    """Draw a place: the mistake that explains it, or where the one lies that nothing names."""
    named = [mistake for mistake in place.mistakes if mistake.is_named]
    head = f"{place.place} {place.outcome}" if named else f"{place.place}: {place.outcome}"
    # A site keeps its name.
    if place.place.split(",")[0] not in set(ModelSite):
        head = head[0].upper() + head[1:]
    canvas.line(head, style="" if place.is_right and not place.method else "bold")
    for sentence in place.lies:
        canvas.paragraph(sentence)
    if named:
        _draw_mistake(canvas, *named)
    if place.method:
        canvas.paragraph(place.method)
    for note in place.notes:
        canvas.item(note)


def _draw_mistake(canvas: Canvas, first: TriedMistake, *alike: TriedMistake) -> None:
    canvas.paragraph(first.what)
    canvas.paragraph(f"Look at {first.look_at}.")
    canvas.paragraph(first.fit)
    if first.sources:
        canvas.paragraph(f"Seen in {', '.join(first.sources)}.")
    for sentence in first.proof:
        canvas.paragraph(sentence)
    for edit in first.edits[:_MOST_EDITS]:
        place, *lines, advice = edit.splitlines()
        _draw_edit(canvas, place.removeprefix("# "), lines, advice.removeprefix("# "))
    if len(first.edits) > _MOST_EDITS:
        canvas.paragraph(f"{len(first.edits) - _MOST_EDITS} more, with other numbers: see --json.")
    words = [_word_alike(other) for other in alike[:_MOST_LISTED]]
    if len(alike) > _MOST_LISTED:
        words.append(f"{len(alike) - _MOST_LISTED} more")
    if words:
        canvas.paragraph(f"Cannot be told from: {'; '.join(words)}.")


def _word_alike(mistake: TriedMistake) -> str:
    name = f"{mistake.name} ({mistake.parameters})" if mistake.parameters else mistake.name
    where = f" {mistake.layers}" if mistake.layers else ""
    outcomes = f" ({', '.join(mistake.outcomes)})" if mistake.outcomes else ""
    return f"{name}, which leaves ρ {mistake.leaves}{where}{outcomes}"


def _draw_edit(canvas: Canvas, place: str, lines: Sequence[str], advice: str) -> None:
    """Draw lines to paste, never broken."""
    canvas.paragraph(place)
    for line in lines:
        canvas.line(f"      {line}")
    canvas.paragraph(advice)
