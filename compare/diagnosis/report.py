"""The report of a diagnosis, and the list of the catalogue, as text and as JSON values.

Wording: the parts of a diagnosis in words, the same in the terminal, in Markdown and in the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from compare.blame.blame import join_causes
from compare.catalogue.candidates import Value, is_list
from compare.diagnosis.finding import Diagnosis, LayerDiagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.layer_group import LayerGroup, group_layers
from compare.diagnosis.proof.proof import MEND_FIRST, draw_proofs, word_outcomes
from minimax_tools.errors import format_count
from minimax_tools.model.sites import FORMULAS, ModelSite, Site
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import Blame, Verdict
from reports.canvas import Canvas
from reports.data import to_json
from reports.wording import word_figure, word_layer, word_sites, word_untested

NOT_OF_SHAPE = "No mistake of the catalogue was tried: none changes a shape."
WRONG_WEIGHTS = "the weights are wrong"
# Sites of a blame whose formulas are told: of more, too many were not shown.
_MOST_FORMULAS = 3


def parts_of(diagnosis: Diagnosis) -> tuple[SiteDiagnosis | LayerGroup, ...]:
    """Return the wrong sites outside the layers and the groups of layers, in the model's order."""
    wrong = [site for site in diagnosis.sites if not site.is_right]
    before = [site for site in wrong if site.site is ModelSite.EMBEDDING]
    behind = [site for site in wrong if site.site is not ModelSite.EMBEDDING]
    return (*before, *group_layers(diagnosis.layers), *behind)


def word_headline(diagnosis: Diagnosis, parts: Sequence[SiteDiagnosis | LayerGroup]) -> str:
    """Return the first wrong place with its mistake, and the number of further ones."""
    if diagnosis.verdict is Verdict.INCOMPARABLE:
        return f"nothing that was compared differs, which is no pass: {diagnosis.unproved}"
    if not diagnosis.exit_code:
        return "nothing to explain" if parts else "nothing differs: there is nothing to diagnose"
    weights = [blame.layer for blame in diagnosis.weights]
    wrong = [f"{word_layers(weights)}: {WRONG_WEIGHTS}"] if weights else []
    wrong += [_word_part(part, diagnosis) for part in parts if not part.is_right]
    if not wrong:
        return "the comparison fails, and nothing was found to diagnose"
    more = f" (and {format_count(len(wrong) - 1, 'more place')})" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}"


def _word_part(part: SiteDiagnosis | LayerGroup, diagnosis: Diagnosis) -> str:
    """Return a wrong part with its mistake, as `layers 0-5, gate_up_swapped`."""
    unnamed = "no known mistake explains it"
    if isinstance(part, SiteDiagnosis):
        return f"{part.site}, {word_mistake(part.named[:1]) if part.named else unnamed}"
    unnamed = WRONG_WEIGHTS if part.is_of_weights else unnamed
    if part.named:
        return f"{word_layers(part.numbers)}, {word_mistake(part.named)}"
    layers = sorted((*part.numbers, *passed_over_like(part, diagnosis)))
    sites = map(word_suspects, part.causes)
    told = "the shape is wrong" if part.is_of_shape else unnamed
    return f"{', '.join([word_layers(layers), *sites])}: {told}"


def word_shape_outcome(group: LayerGroup) -> str:
    """Return what is wrong with layers of which a shape is all that fails."""
    before = word_range(layer.unexplained for layer in group.diagnoses)
    return (
        f"the shape is wrong{f', and no other site fails (ρ {before})' if group.diagnoses[0].sites else ''}"
    )


def word_place_of_fault(cause: Sequence[Blame]) -> tuple[str, ...]:
    """Return sentences on the sites between which a mistake lies, and on what the original computes there."""
    formulas = {site: formula for blame in cause for site, formula in formulas_of(blame).items()}
    if any(blame.is_of_weights for blame in cause):
        # They were seen: where the mistake lies is no question.
        return tuple(blame.reason for blame in cause)
    return word_lies_between(cause), *(f"Original: {site} = {formula}" for site, formula in formulas.items())


def word_lies_between(cause: Sequence[Blame]) -> str:
    """Return the sites between which the mistake of a cause lies."""
    if not all(blame.right for blame in cause):
        return " ".join(f"Lies in {blame.sites[-1]}: {blame.reason}." for blame in cause)
    right = ", ".join(dict.fromkeys(site for blame in cause for site in blame.right))
    wrong = " and ".join(blame.sites[-1] for blame in cause)
    hidden = [name for blame in cause for name in word_sites(blame.sites[:-1])]
    more = f"; {', '.join(hidden)} not compared" if hidden else ""
    both = f"; one cause, the {cause[0].operation}" if len(cause) > 1 else ""
    return f"Lies between {right} (right) and {wrong} (wrong){more}{both}."


def word_suspects(cause: Sequence[Blame]) -> str:
    """Return the sites of a cause; those of one operation joined by `and`, as both are wrong."""
    return " and ".join(", ".join(word_sites(blame.sites)) for blame in cause)


def formulas_of(blame: Blame) -> dict[str, str]:
    """Return what the original computes at the sites of a blame; {} for too many, which a formula cannot narrow."""
    if len(blame.sites) > _MOST_FORMULAS:
        return {}
    return {str(site): FORMULAS[site] for site in (*Site, *ModelSite) if str(site) in blame.sites}


def passed_over_like(group: LayerGroup, diagnosis: Diagnosis) -> tuple[int, ...]:
    """Return the layers that were passed over since they are like those of a group."""
    return tuple(
        layer
        for passed in diagnosis.passed_over
        if set(passed.like) & set(group.numbers)
        for layer in passed.layers
    )


def word_passed_over(group: LayerGroup, diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return a sentence on the layers that were passed over since they are like those of a group; () without any."""
    alike = passed_over_like(group, diagnosis)
    if not alike:
        return ()
    return (
        f"{len(alike)} more {'shows' if len(alike) == 1 else 'show'} the same pattern: {word_layers(alike)}. "
        "Nothing was tried there; --layer-pattern 'layer_*' tries each layer.",
    )


def word_method(group: LayerGroup) -> str:
    """Return the number of hypotheses that were tried on a group, and the sites that judged them."""
    sites = dict.fromkeys(str(site) for layer in group.diagnoses for site in layer.sites)
    tried = word_range((layer.num_hypotheses for layer in group.diagnoses), word=lambda value: f"{value:g}")
    each = "" if len(group.diagnoses) == 1 else " on each"
    return f"{tried} hypotheses tried{each}, judged by {', '.join(sites)}"


def word_notes(group: LayerGroup) -> tuple[str, ...]:
    """Return the notes on a group of layers, each with its layers unless it is of all."""
    noted = {
        note: [layer.layer for layer in group.diagnoses if note in layer.notes]
        for layer in group.diagnoses
        for note in layer.notes
    }
    return tuple(
        note if len(layers) == len(group.diagnoses) else f"{word_layers(layers)}: {note}"
        for note, layers in noted.items()
    )


def word_explanation(findings: Sequence[MistakeFinding]) -> str:
    """Return how well a mistake explains some layers."""
    explains = word_range((100 * finding.explains for finding in findings), word=lambda value: f"{value:.4g}")
    amplitudes = word_range((finding.amplitude for finding in findings), word=lambda value: f"{value:.3f}")
    # A choice of experts that is explained to the last token has no uncertainty.
    certainties = [finding.z for finding in findings if math.isfinite(finding.z)]
    certainty = f", {word_range(certainties)} times its uncertainty" if certainties else ""
    return f"Explains {explains} % of the error; amplitude {amplitudes}{certainty}."


def word_what(findings: Sequence[MistakeFinding]) -> str:
    """Return what a port does that makes a mistake in some layers; numbers of each expert or token are of the first."""
    first = findings[0]
    if len(findings) > 1 and any(is_list(value) for value in first.parameters.values()):
        return f"{first.what} These are the numbers of layer {first.layer}."
    return first.what


def word_right_sites(diagnosis: Diagnosis) -> str:
    """Return the right sites outside the layers; empty if there are none, or the whole run is right."""
    right = [site for site in diagnosis.sites if site.is_right]
    if not right or not diagnosis.exit_code:
        return ""
    names = ", ".join(str(site.site) for site in right)
    figures = word_range(site.unexplained for site in right)
    return f"{names}: nothing to explain (ρ {figures} on the port's own input)"


def capitalise(words: str) -> str:
    """Return words with a capital at the front."""
    return words[0].upper() + words[1:]


def untold_blame(diagnosis: Diagnosis) -> tuple[tuple[Blame, ...], ...]:
    """Return the causes that no named mistake explains, and of which no diagnosed part tells."""
    told = {layer.layer for layer in diagnosis.layers}
    told |= {layer for passed in diagnosis.passed_over for layer in passed.layers}
    sites = {str(site.site) for site in diagnosis.sites if not site.is_right}
    return join_causes(
        blame
        for blame in diagnosis.unexplained_blame
        if not (blame.layer in told or (blame.layer is None and sites & set(blame.sites)))
    )


def word_mistake(findings: Sequence[MistakeFinding]) -> str:
    """Word a mistake with its parameters, as in `rope_theta (theta 1e+04)`; fitted ones as a range."""
    words = [
        f"{name} {_word_parameter([finding.parameters[name] for finding in findings])}"
        for name, value in findings[0].parameters.items()
        if not is_list(value)
    ]
    return f"{findings[0].mistake} ({', '.join(words)})" if words else findings[0].mistake


def _word_parameter(values: Sequence[Value]) -> str:
    """Word a parameter of a group of layers: a range of floats, or the only value of another kind."""
    fitted = [value for value in values if isinstance(value, float)]
    return word_range(fitted, word=lambda value: f"{value:.4g}") if fitted else str(values[0])


def word_where(findings: Sequence[MistakeFinding], group: LayerGroup) -> str:
    """Word the layers of some findings; return an empty text if these are all layers of the group."""
    layers = sorted({finding.layer for finding in findings if finding.layer is not None})
    return "" if len(layers) == len(group.diagnoses) else f" in {word_layers(layers)}"


def word_range(values: Iterable[float], *, word: Callable[[float], str] = word_figure) -> str:
    """Word the least and the largest value, such as `0.98 … 1.02`; only one if both read alike."""
    ordered = sorted(values)
    least, largest = word(ordered[0]), word(ordered[-1])
    return least if least == largest else f"{least} … {largest}"


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
