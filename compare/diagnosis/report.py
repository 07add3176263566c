"""The report of a diagnosis: as text for whoever mends the port, and as JSON values."""

from __future__ import annotations

from typing import Any

from compare.diagnosis.catalogue.catalogue import CATALOGUE
from compare.diagnosis.finding import Diagnosis, Finding, LayerDiagnosis
from compare.diagnosis.mistake import word_mistake
from reports.canvas import Canvas, Column, Row
from reports.json_values import to_json
from reports.wording import word_figure

_MOST_LISTED = 3


def diagnosis_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON: `diagnosis` lists the mistakes that were named, layers ascending, best first."""
    return {
        "diagnosis": to_json(diagnosis.findings),
        "layers": [
            {
                "layer": layer.layer,
                "sites": to_json(layer.sites),
                "unexplained": to_json(layer.unexplained),
                "is_explained": bool(layer.named),
                "nearest": to_json(layer.nearest),
                "num_hypotheses": layer.num_hypotheses,
                "notes": list(layer.notes),
            }
            for layer in diagnosis.layers
        ],
        "reference": diagnosis.reference,
        "target": diagnosis.target,
        "is_failed": diagnosis.is_failed,
        "notes": list(diagnosis.notes),
    }


def render_diagnosis(
    diagnosis: Diagnosis, *, width: int | None = None, is_terminal: bool | None = None
) -> str:
    """The diagnosis as text; see `reports.terminal.render_comparison`."""
    canvas = Canvas(width=width, is_terminal=is_terminal)
    if not diagnosis.layers:
        canvas.line("nothing differs: there is nothing to diagnose", style="bold green")
    for number, layer in enumerate(diagnosis.layers):
        if number:
            canvas.gap()
        _draw_layer(canvas, layer)
    canvas.facts([("reference", diagnosis.reference), ("target", diagnosis.target)])
    for note in diagnosis.notes:
        canvas.item(note)
    return canvas.text


def render_catalogue(*, width: int | None = None, is_terminal: bool | None = None) -> str:
    """The catalogue as a table."""
    canvas = Canvas(width=width, is_terminal=is_terminal)
    columns = [Column(title=title, is_text=True) for title in ("mistake", "what the port does")]
    canvas.table(columns, [Row(cells=(mistake.name, mistake.what)) for mistake in CATALOGUE.values()])
    return canvas.text


def catalogue_record() -> dict[str, Any]:
    """The catalogue as JSON."""
    return {
        "mistakes": [
            {
                "mistake": mistake.name,
                "what": mistake.what,
                "look_at": mistake.look_at,
                "sources": list(mistake.sources),
            }
            for mistake in CATALOGUE.values()
        ]
    }


def _draw_layer(canvas: Canvas, layer: LayerDiagnosis) -> None:
    before = f"ρ {word_figure(layer.unexplained)}"
    if layer.named:
        first, *others = layer.named
        canvas.line(
            f"Layer {layer.layer} matches {_word(first)}: leaves ρ {word_figure(first.leaves)} "
            f"of {word_figure(layer.unexplained)}",
            style="bold",
        )
        canvas.paragraph(first.what)
        canvas.paragraph(f"Look at {first.look_at}.")
        canvas.paragraph(
            f"Explains {100 * first.explains:.4g} % of the error; amplitude {first.amplitude:.3f}, "
            f"{word_figure(first.z)} times its uncertainty."
        )
        if first.sources:
            canvas.paragraph(f"Seen in {', '.join(first.sources)}.")
        for other in others[:_MOST_LISTED]:
            canvas.paragraph(
                f"{_word(other)} resembles it: leaves ρ {word_figure(other.leaves)}. Nothing in these captures "
                "tells the two apart."
            )
    else:
        canvas.line(f"Layer {layer.layer}: no known mistake explains it ({before})", style="bold")
        for other in layer.nearest[:_MOST_LISTED]:
            canvas.paragraph(f"nearest: {_word(other)} leaves ρ {word_figure(other.leaves)}")
    canvas.paragraph(
        f"{layer.num_hypotheses} hypotheses tried, judged by {', '.join(str(site) for site in layer.sites)}"
    )
    for note in layer.notes:
        canvas.item(note)


def _word(finding: Finding) -> str:
    return word_mistake(finding.mistake, finding.parameters)
