"""A diagnosis in words: its places in the model's order, for the terminal, Markdown and the page alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from compare.blame.blame import join_causes
from compare.catalogue.candidates import Value, is_list
from compare.catalogue.repairs import lines_for_layers
from compare.diagnosis.finding import Diagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.layer_group import LayerGroup, gather_alike, group_layers
from compare.diagnosis.proof import (
    MEND_FIRST,
    PROVE_THE_PLACE,
    MistakeProof,
    ProofOutcome,
    word_lines_place,
    word_proof,
)
from minimax_tools.errors import format_count
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import Blame, Verdict
from reports.page.evidence import DiagnosedPlace, DiagnosedRun, TriedMistake
from reports.wording import word_figure, word_layer, word_sites

_WRONG_WEIGHTS = "the weights are wrong"
_NOT_OF_SHAPE = "No mistake of the catalogue was tried: none changes a shape."
# Sites of a blame whose formulas are told: of more, too many were not shown.
_MOST_FORMULAS = 3

Part = SiteDiagnosis | LayerGroup


def word_diagnosis(diagnosis: Diagnosis) -> DiagnosedRun:
    """Return a diagnosis in words: the groups of layers and the sites outside them, in the model's order."""
    parts = _parts_of(diagnosis)
    proofs = [finding.proof for finding in diagnosis.findings if finding.proof is not None]
    return DiagnosedRun(
        headline=f"{str(diagnosis.verdict).upper()}: {_word_headline(diagnosis, parts)}",
        places=(
            *_wrong_weights(diagnosis),
            *(
                _layers(part, diagnosis) if isinstance(part, LayerGroup) else _wrong_site(part, diagnosis)
                for part in parts
            ),
            *_right_sites(diagnosis),
            *_not_diagnosed(diagnosis),
        ),
        notes=(*diagnosis.notes, *((MEND_FIRST,) if any(proof.is_proved for proof in proofs) else ())),
    )


def _parts_of(diagnosis: Diagnosis) -> tuple[Part, ...]:
    """Return the wrong sites outside the layers and the groups of layers, in the model's order."""
    wrong = [site for site in diagnosis.sites if not site.is_right]
    before = [site for site in wrong if site.site is ModelSite.EMBEDDING]
    behind = [site for site in wrong if site.site is not ModelSite.EMBEDDING]
    return (*before, *group_layers(diagnosis.layers), *behind)


def _word_headline(diagnosis: Diagnosis, parts: Sequence[Part]) -> str:
    """Return the first wrong place with its mistake, and the number of further ones."""
    if diagnosis.verdict is Verdict.INCOMPARABLE:
        return f"nothing that was compared differs, which is no pass: {diagnosis.unproved}"
    if not diagnosis.exit_code:
        return "nothing to explain" if parts else "nothing differs: there is nothing to diagnose"
    weights = [blame.layer for blame in diagnosis.weights]
    wrong = [f"{word_layers(weights)}: {_WRONG_WEIGHTS}"] if weights else []
    wrong += [_word_part(part, diagnosis) for part in parts if not part.is_right]
    if not wrong:
        return "the comparison fails, and nothing was found to diagnose"
    more = f" (and {format_count(len(wrong) - 1, 'more place')})" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}"


def _word_part(part: Part, diagnosis: Diagnosis) -> str:
    """Return a wrong part with its mistake, as `layers 0-5, gate_up_swapped`."""
    unnamed = "no known mistake explains it"
    if isinstance(part, SiteDiagnosis):
        return f"{part.site}, {word_mistake(part.named[:1]) if part.named else unnamed}"
    if part.named:
        return f"{word_layers(part.numbers)}, {word_mistake(part.named)}"
    layers = sorted((*part.numbers, *_passed_over_like(part, diagnosis)))
    sites = map(_word_suspects, part.causes)
    if part.first.is_of_shape:
        unnamed = "the shape is wrong"
    elif part.is_of_weights:
        unnamed = _WRONG_WEIGHTS
    return f"{', '.join([word_layers(layers), *sites])}: {unnamed}"


def _wrong_weights(diagnosis: Diagnosis) -> Iterator[DiagnosedPlace]:
    """Yield the wrong weights, which were seen: nothing is searched or proved there."""
    layers_of: dict[str, list[int | None]] = {}
    for blame in diagnosis.weights:
        layers_of.setdefault(blame.reason, []).append(blame.layer)
    for reason, layers in layers_of.items():
        yield DiagnosedPlace(
            place=word_layers(layers), outcome=_WRONG_WEIGHTS, is_right=False, lies=(reason,)
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
    elif group.first.is_of_shape:
        right = f", and no other site fails (ρ {before})" if group.first.sites else ""
        outcome = f"the shape is wrong{right}"
    else:
        unnamed = f"no known mistake explains {'it' if is_single else 'them'}"
        outcome = f"{_WRONG_WEIGHTS if group.is_of_weights else unnamed} (ρ {before})"
        lies = (
            *(sentence for cause in group.causes for sentence in _word_place_of_fault(cause, diagnosis)),
            *_word_passed_over(group, diagnosis),
        )
        mistakes = tuple(_nearest(group))
    return DiagnosedPlace(
        place=word_layers(group.numbers),
        outcome=outcome,
        is_right=group.is_right,
        lies=lies,
        mistakes=mistakes,
        method=_NOT_OF_SHAPE if group.first.is_of_shape else _word_method(group),
        notes=_word_notes(group),
    )


def _nearest(group: LayerGroup) -> Iterator[TriedMistake]:
    """Yield the mistakes that came nearest in some layer of a group, what leaves least first."""
    gathered = gather_alike(finding for layer in group.diagnoses for finding in layer.nearest)
    for findings in sorted(gathered, key=lambda alike: min(finding.leaves for finding in alike)):
        yield _mistake(findings, group, is_named=False)


def _wrong_site(site: SiteDiagnosis, diagnosis: Diagnosis) -> DiagnosedPlace:
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
        lies=() if site.named else (f"Original: {site.site} = {diagnosis.formula(site.site)}",),
        mistakes=tuple(_mistake([finding], None, is_named=is_named) for finding, is_named in tried),
        method=f"{site.num_hypotheses} hypotheses tried on the port's own input",
        notes=site.notes,
    )


def _right_sites(diagnosis: Diagnosis) -> Iterator[DiagnosedPlace]:
    """Yield the right sites outside the layers as one place, unless the whole run is right."""
    right = [site for site in diagnosis.sites if site.is_right]
    if right and diagnosis.exit_code:
        figures = word_range(site.unexplained for site in right)
        yield DiagnosedPlace(
            place=", ".join(str(site.site) for site in right),
            outcome=f"nothing to explain (ρ {figures} on the port's own input)",
            is_right=True,
        )


def _not_diagnosed(diagnosis: Diagnosis) -> Iterator[DiagnosedPlace]:
    """Yield the causes that no named mistake explains, and of which no diagnosed part tells."""
    told = {layer.layer for layer in diagnosis.layers}
    told |= {layer for passed in diagnosis.passed_over for layer in passed.layers}
    sites = {str(site.site) for site in diagnosis.sites if not site.is_right}
    untold = [
        blame
        for blame in diagnosis.unexplained_blame
        if not (blame.layer in told or (blame.layer is None and sites & set(blame.sites)))
    ]
    for cause in join_causes(untold):
        yield DiagnosedPlace(
            place=", ".join((word_layer(cause[0].layer), _word_suspects(cause))),
            outcome="not diagnosed",
            is_right=False,
            lies=_word_place_of_fault(cause, diagnosis),
        )


def _mistake(findings: Sequence[MistakeFinding], group: LayerGroup | None, *, is_named: bool) -> TriedMistake:
    """Return a mistake as it was tried on some layers of a group, or on one site outside the layers."""
    first = findings[0]
    layers = sorted({finding.layer for finding in findings if finding.layer is not None})
    is_everywhere = group is None or len(layers) == len(group.diagnoses)
    return TriedMistake(
        name=first.mistake,
        parameters=word_mistake(findings).removeprefix(first.mistake).strip(" ()"),
        is_named=is_named,
        leaves=word_range(finding.leaves for finding in findings),
        explains=word_range(
            (100 * finding.explains for finding in findings), word=lambda value: f"{value:.1f}"
        ),
        fit=_word_fit(findings),
        what=_word_what(findings),
        look_at=first.look_at,
        layers="" if is_everywhere else f"in {word_layers(layers)}",
        sources=first.sources,
        proof=_word_proofs(findings),
        outcomes=tuple(dict.fromkeys(str(proof.outcome) for _, proof in _proofs(findings))),
        edits=tuple(_proved_edits(findings)),
    )


def word_mistake(findings: Sequence[MistakeFinding]) -> str:
    """Word a mistake with its parameters, as in `rope_theta (theta 1e+04)`; fitted ones as a range."""

    def word(values: Sequence[Value]) -> str:
        fitted = [value for value in values if isinstance(value, float)]
        return word_range(fitted, word=lambda value: f"{value:.4g}") if fitted else str(values[0])

    words = [
        f"{name} {word([finding.parameters[name] for finding in findings])}"
        for name, value in findings[0].parameters.items()
        if not is_list(value)
    ]
    return f"{findings[0].mistake} ({', '.join(words)})" if words else findings[0].mistake


def word_range(values: Iterable[float], *, word: Callable[[float], str] = word_figure) -> str:
    """Word the least and the largest value, such as `0.98 … 1.02`; only one if both read alike."""
    ordered = sorted(values)
    least, largest = word(ordered[0]), word(ordered[-1])
    return least if least == largest else f"{least} … {largest}"


def _word_fit(findings: Sequence[MistakeFinding]) -> str:
    explains = word_range((100 * finding.explains for finding in findings), word=lambda value: f"{value:.4g}")
    amplitudes = word_range((finding.amplitude for finding in findings), word=lambda value: f"{value:.3f}")
    # A choice of experts that is explained to the last token has no uncertainty.
    certainties = [finding.z for finding in findings if math.isfinite(finding.z)]
    certainty = f", {word_range(certainties)} times its uncertainty" if certainties else ""
    return f"Explains {explains} % of the error; amplitude {amplitudes}{certainty}."


def _word_what(findings: Sequence[MistakeFinding]) -> str:
    """Return what the port does; numbers of each expert or token are those of the first layer."""
    first = findings[0]
    if len(findings) > 1 and any(is_list(value) for value in first.parameters.values()):
        return f"{first.what} These are the numbers of layer {first.layer}."
    return first.what


def _word_proofs(findings: Sequence[MistakeFinding]) -> tuple[str, ...]:
    """Return sentences on the proofs of one mistake; layers of one outcome are told by the first of them."""
    proofs = _proofs(findings)
    sentences: list[str] = []
    for outcome in ProofOutcome:
        alike = [(layer, proof) for layer, proof in proofs if proof.outcome is outcome]
        if alike:
            where = word_layers(layer for layer, _ in alike)
            first, *others = word_proof(alike[0][1])
            told = first if len(proofs) == 1 else f"{where[0].upper()}{where[1:]}: {first}"
            sentences += [told, *others]
    return tuple(sentences)


def _proved_edits(findings: Sequence[MistakeFinding]) -> Iterator[str]:
    """Yield the lines that undo a mistake in the weights, as the proofs ran them; those of several layers once."""
    alike: dict[tuple[str, ...], list[tuple[int, MistakeProof]]] = {}
    for layer, proof in _proofs(findings):
        if proof.is_proved and proof.edit and layer is not None:
            alike.setdefault(proof.edit, []).append((layer, proof))
    for edit, proofs in alike.items():
        _, proof = proofs[0]
        lines = lines_for_layers(
            edit,
            tuple(layer for layer, _ in proofs),
            num_layers=proof.num_layers,
            has_conversion=proof.has_conversion,
        )
        place = word_lines_place(has_conversion=proof.has_conversion)
        yield "\n".join((f"# {place}", *lines, f"# {PROVE_THE_PLACE}"))


def _proofs(findings: Sequence[MistakeFinding]) -> list[tuple[int | None, MistakeProof]]:
    return [(finding.layer, finding.proof) for finding in findings if finding.proof is not None]


def _word_place_of_fault(cause: Sequence[Blame], diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return sentences on the sites between which a mistake lies, and on what the original computes there."""
    if any(blame.is_of_weights for blame in cause):
        # They were seen: where the mistake lies is no question.
        return tuple(blame.reason for blame in cause)
    formulas = {site: words for blame in cause for site, words in formulas_of(blame, diagnosis).items()}
    return word_lies_between(cause), *(f"Original: {site} = {words}" for site, words in formulas.items())


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


def _word_suspects(cause: Sequence[Blame]) -> str:
    """Return the sites of a cause; those of one operation joined by `and`, as both are wrong."""
    return " and ".join(", ".join(word_sites(blame.sites)) for blame in cause)


def formulas_of(blame: Blame, diagnosis: Diagnosis) -> dict[str, str]:
    """Return what the original computes at the sites of a blame; {} for too many, which a formula cannot narrow."""
    if len(blame.sites) > _MOST_FORMULAS:
        return {}
    return {str(site): diagnosis.formula(site) for site in (*Site, *ModelSite) if str(site) in blame.sites}


def _passed_over_like(group: LayerGroup, diagnosis: Diagnosis) -> tuple[int, ...]:
    """Return the layers that were passed over since they are like those of a group."""
    return tuple(
        layer
        for passed in diagnosis.passed_over
        if set(passed.like) & set(group.numbers)
        for layer in passed.layers
    )


def _word_passed_over(group: LayerGroup, diagnosis: Diagnosis) -> tuple[str, ...]:
    alike = _passed_over_like(group, diagnosis)
    if not alike:
        return ()
    return (
        f"{len(alike)} more {'shows' if len(alike) == 1 else 'show'} the same pattern: {word_layers(alike)}. "
        "Nothing was tried there; --layer-pattern 'layer_*' tries each layer.",
    )


def _word_method(group: LayerGroup) -> str:
    sites = dict.fromkeys(str(site) for layer in group.diagnoses for site in layer.sites)
    tried = word_range((layer.num_hypotheses for layer in group.diagnoses), word=lambda value: f"{value:g}")
    each = "" if len(group.diagnoses) == 1 else " on each"
    return f"{tried} hypotheses tried{each}, judged by {', '.join(sites)}"


def _word_notes(group: LayerGroup) -> tuple[str, ...]:
    """Return the notes on a group of layers, each with its layers unless it is of all."""
    layers_of: dict[str, list[int]] = {}
    for layer in group.diagnoses:
        for note in layer.notes:
            layers_of.setdefault(note, []).append(layer.layer)
    return tuple(
        note if set(layers) == set(group.numbers) else f"{word_layers(layers)}: {note}"
        for note, layers in layers_of.items()
    )
