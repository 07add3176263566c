"""The report of a diagnosis, and the list of the catalogue, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from compare.diagnosis.catalogue.catalogue import CATALOGUE
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.layer_group import LayerGroup, group_layers
from compare.diagnosis.mistake import Mistake, Value
from compare.diagnosis.model.catalogue import MODEL_CATALOGUE
from compare.diagnosis.model.mistake import ModelMistake
from compare.diagnosis.proof.wording import MEND_FIRST, draw_proofs, word_outcomes
from minimax_tools.errors import format_count
from minimax_tools.model.formulas import FORMULAS
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import Blame
from reports.canvas import Canvas, Column, Row
from reports.json_values import to_json
from reports.wording import word_figure, word_place, word_sites

# Mistakes that are listed of a group of layers.
_MOST_LISTED = 3
_NOT_OF_SHAPE = "No mistake of the catalogue was tried: none changes a shape."
_NOTHING_TO_PROVE = "Nothing to prove: no mistake was named."
# Sites of a blame whose formulas are told: of more, too many were not shown.
_MOST_FORMULAS = 3


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
        "passed_over": to_json(diagnosis.passed_over),
        "unexplained_blame": [
            {**to_json(blame), "formulas": _formulas(blame)} for blame in diagnosis.unexplained_blame
        ],
        "reference": diagnosis.reference,
        "target": diagnosis.target,
        "is_failed": diagnosis.is_failed,
        "notes": list(diagnosis.notes),
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
    parts = _parts(diagnosis)
    _draw_verdict(canvas, diagnosis, parts)
    if proves and not diagnosis.findings:
        canvas.line(_NOTHING_TO_PROVE)
    canvas.facts([("golden", diagnosis.reference), ("run", diagnosis.target)])
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
    return canvas.text


def render_nothing_to_prove(diagnosis: Diagnosis) -> str:
    """Render the answer to --prove where a diagnosis named nothing: its verdict, and the places of the mistakes."""
    canvas = Canvas(width=None, is_terminal=None)
    _draw_verdict(canvas, diagnosis, _parts(diagnosis))
    canvas.line(_NOTHING_TO_PROVE)
    of_shape = [layer for layer in diagnosis.layers if layer.is_of_shape]
    others = [
        blame
        for blame in diagnosis.unexplained_blame
        if blame.right and blame.layer not in {layer.layer for layer in of_shape}
    ]
    for place in dict.fromkeys(_word_lies_between(blame) for blame in others):
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
    columns = [Column(title=title, is_text=True) for title in ("mistake", "what the port does")]
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


def _parts(diagnosis: Diagnosis) -> tuple[SiteDiagnosis | LayerGroup, ...]:
    """Return the wrong sites outside the layers and the groups of layers, in the model's order."""
    wrong = [site for site in diagnosis.sites if not site.is_right]
    before = [site for site in wrong if site.site is ModelSite.EMBEDDING]
    behind = [site for site in wrong if site.site is not ModelSite.EMBEDDING]
    return (*before, *group_layers(diagnosis.layers), *behind)


def _draw_verdict(canvas: Canvas, diagnosis: Diagnosis, parts: Sequence[SiteDiagnosis | LayerGroup]) -> None:
    canvas.line(
        f"{str(diagnosis.verdict).upper()}: {_headline(diagnosis, parts)}",
        style="bold red" if diagnosis.exit_code else "bold green",
    )


def _headline(diagnosis: Diagnosis, parts: Sequence[SiteDiagnosis | LayerGroup]) -> str:
    """Return the first wrong place with its mistake, and the number of further ones."""
    if not diagnosis.exit_code:
        return "nothing to explain" if parts else "nothing differs: there is nothing to diagnose"
    wrong = [_word_part(part, diagnosis) for part in parts if not part.is_right]
    if not wrong:
        return "the comparison fails, and nothing was found to diagnose"
    more = f" (and {format_count(len(wrong) - 1, 'more place')})" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}"


def _word_part(part: SiteDiagnosis | LayerGroup, diagnosis: Diagnosis) -> str:
    """Return a wrong part with its mistake, as `layers 0-5, gate_up_swapped`."""
    unnamed = "no known mistake explains it"
    if isinstance(part, SiteDiagnosis):
        return f"{part.site}, {_word_mistake(part.named[:1]) if part.named else unnamed}"
    if part.named:
        return f"{word_layers(part.numbers)}, {_word_mistake(part.named)}"
    layers = sorted((*part.numbers, *_alike(part, diagnosis)))
    sites = dict.fromkeys(site for blame in part.blame for site in word_sites(blame.sites))
    told = "the shape is wrong" if part.is_of_shape else unnamed
    return f"{', '.join([word_layers(layers), *sites])}: {told}"


def _draw_site(canvas: Canvas, site: SiteDiagnosis) -> None:
    """Draw a site that is wrong: the mistake that explains it, or what the original computes there."""
    before = word_figure(site.unexplained)
    if site.named:
        first, *others = site.named
        canvas.line(
            f"{site.site} matches {_word_mistake([first])}: leaves ρ {word_figure(first.leaves)} of {before}",
            style="bold",
        )
        _draw_mistake(canvas, [first])
        draw_proofs(canvas, [first])
        if others:
            words = (
                f"{_word_mistake([other])}, which leaves ρ {word_figure(other.leaves)}" for other in others
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
    where, is_single = _capitalise(word_layers(group.numbers)), len(group.numbers) == 1
    before = _word_range(layer.unexplained for layer in group.diagnoses)
    if group.named:
        leaves = _word_range(finding.leaves for finding in group.named)
        matches = "matches" if is_single else "match"
        canvas.line(
            f"{where} {matches} {_word_mistake(group.named)}: leaves ρ {leaves} of {before}", style="bold"
        )
        _draw_mistake(canvas, group.named)
        draw_proofs(canvas, group.named)
        _draw_look_alikes(canvas, group)
    elif group.is_right:
        canvas.line(f"{where}: nothing to explain (ρ {before})", style="bold")
    elif group.is_of_shape:
        others = f", and no other site fails (ρ {before})" if group.diagnoses[0].sites else ""
        canvas.line(f"{where}: the shape is wrong{others}", style="bold")
        canvas.paragraph(_NOT_OF_SHAPE)
        _draw_notes(canvas, group)
        return
    else:
        them = "it" if is_single else "them"
        canvas.line(f"{where}: no known mistake explains {them} (ρ {before})", style="bold")
        for blame in group.blame:
            _draw_place(canvas, blame)
        alike = _alike(group, diagnosis)
        if alike:
            canvas.paragraph(
                f"{len(alike)} more {'shows' if len(alike) == 1 else 'show'} the same pattern: {word_layers(alike)}. "
                "Nothing was tried there; --layer-pattern 'layer_*' tries each layer."
            )
    _draw_method(canvas, group)


def _draw_place(canvas: Canvas, blame: Blame) -> None:
    """Draw the sites between which a mistake lies, and what the original computes there."""
    canvas.paragraph(_word_lies_between(blame))
    for site, formula in _formulas(blame).items():
        canvas.paragraph(f"Original: {site} = {formula}")


def _word_lies_between(blame: Blame) -> str:
    *hidden, wrong = blame.sites
    right = f"{', '.join(blame.right)} (right)"
    if not blame.right:
        return f"Lies in {wrong}: {blame.reason}."
    if hidden:
        return f"Lies between {right} and {wrong} (wrong); {', '.join(word_sites(hidden))} not compared."
    return f"Lies between {right} and {wrong} (wrong)."


def _formulas(blame: Blame) -> dict[str, str]:
    """Return what the original computes at the sites of a blame; {} for too many, which a formula cannot narrow."""
    if len(blame.sites) > _MOST_FORMULAS:
        return {}
    return {str(site): FORMULAS[site] for site in (*Site, *ModelSite) if str(site) in blame.sites}


def _alike(group: LayerGroup, diagnosis: Diagnosis) -> tuple[int, ...]:
    """Return the layers that were passed over since they are like those of a group."""
    return tuple(
        layer
        for passed in diagnosis.passed_over
        if set(passed.like) & set(group.numbers)
        for layer in passed.layers
    )


def _capitalise(words: str) -> str:
    return words[0].upper() + words[1:]


def _draw_mistake(canvas: Canvas, named: Sequence[MistakeFinding]) -> None:
    """Draw a mistake from its findings, one for each layer: what the port does, where to look, how well it explains."""
    first = named[0]
    canvas.paragraph(first.what)
    canvas.paragraph(f"Look at {first.look_at}.")
    explains = _word_range((100 * finding.explains for finding in named), word=lambda value: f"{value:.4g}")
    amplitudes = _word_range((finding.amplitude for finding in named), word=lambda value: f"{value:.3f}")
    certainty = _word_range(finding.z for finding in named)
    canvas.paragraph(
        f"Explains {explains} % of the error; amplitude {amplitudes}, {certainty} times its uncertainty."
    )
    if first.sources:
        canvas.paragraph(f"Seen in {', '.join(first.sources)}.")


def _draw_look_alikes(canvas: Canvas, group: LayerGroup) -> None:
    """Draw the mistakes that the captures of some layer cannot tell from the named one."""
    if not group.others:
        return
    words = [
        f"{_word_mistake(other)}, which leaves ρ {_word_range(finding.leaves for finding in other)}"
        f"{_word_where(other, group)}{word_outcomes(other)}"
        for other in group.others[:_MOST_LISTED]
    ]
    hidden = len(group.others) - len(words)
    words += [f"{hidden} more"] if hidden else []
    canvas.paragraph(f"Cannot be told from: {'; '.join(words)}.")


def _draw_method(canvas: Canvas, group: LayerGroup) -> None:
    """Draw how the layers were diagnosed: the number of hypotheses, the judging sites, and the notes."""
    sites = dict.fromkeys(str(site) for layer in group.diagnoses for site in layer.sites)
    tried = _word_range((layer.num_hypotheses for layer in group.diagnoses), word=lambda value: f"{value:g}")
    each = "" if len(group.diagnoses) == 1 else " on each"
    canvas.paragraph(f"{tried} hypotheses tried{each}, judged by {', '.join(sites)}")
    _draw_notes(canvas, group)


def _draw_notes(canvas: Canvas, group: LayerGroup) -> None:
    """Draw the notes of the layers; those of some layers alone name these."""
    for note in dict.fromkeys(note for layer in group.diagnoses for note in layer.notes):
        noted = [layer.layer for layer in group.diagnoses if note in layer.notes]
        canvas.item(note if len(noted) == len(group.diagnoses) else f"{word_layers(noted)}: {note}")


def _draw_right_sites(canvas: Canvas, diagnosis: Diagnosis) -> None:
    """Draw one line for the right sites outside the layers, unless the whole run is right."""
    right = [site for site in diagnosis.sites if site.is_right]
    if not right or not diagnosis.exit_code:
        return
    names = ", ".join(str(site.site) for site in right)
    figures = _word_range(site.unexplained for site in right)
    canvas.line(f"{names}: nothing to explain (ρ {figures} on the port's own input)")


def _draw_unexplained(canvas: Canvas, diagnosis: Diagnosis) -> None:
    """Draw what the comparison blames and no named mistake explains, if nothing above tells of it."""
    told = {layer.layer for layer in diagnosis.layers}
    told |= {layer for passed in diagnosis.passed_over for layer in passed.layers}
    sites = {str(site.site) for site in diagnosis.sites if not site.is_right}
    for blame in diagnosis.unexplained_blame:
        if blame.layer in told or (blame.layer is None and sites & set(blame.sites)):
            continue
        canvas.gap()
        canvas.paragraph(f"{_capitalise(word_place(blame.layer, blame.sites))}: not diagnosed", indent=0)
        _draw_place(canvas, blame)


def _word_mistake(findings: Sequence[MistakeFinding]) -> str:
    """Word a mistake with its parameters, as in `rope_theta (theta 1e+04)`; fitted ones as a range."""
    words = [
        f"{name} {_word_parameter([finding.parameters[name] for finding in findings])}"
        for name in findings[0].parameters
    ]
    return f"{findings[0].mistake} ({', '.join(words)})" if words else findings[0].mistake


def _word_parameter(values: Sequence[Value]) -> str:
    """Word a parameter of a group of layers: a range of floats, or the only value of another kind."""
    fitted = [value for value in values if isinstance(value, float)]
    return _word_range(fitted, word=lambda value: f"{value:.4g}") if fitted else str(values[0])


def _word_where(findings: Sequence[MistakeFinding], group: LayerGroup) -> str:
    """Word the layers of some findings; return an empty text if these are all layers of the group."""
    layers = sorted({finding.layer for finding in findings if finding.layer is not None})
    return "" if len(layers) == len(group.diagnoses) else f" in {word_layers(layers)}"


def _word_range(values: Iterable[float], *, word: Callable[[float], str] = word_figure) -> str:
    """Word the least and the largest value, such as `0.98 … 1.02`; only one if both read alike."""
    ordered = sorted(values)
    least, largest = word(ordered[0]), word(ordered[-1])
    return least if least == largest else f"{least} … {largest}"
