"""Wording: the parts of a diagnosis in words, the same in the terminal, in Markdown and in the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from compare.blame.blame import join_causes
from compare.diagnosis.finding import Diagnosis, MistakeFinding, SiteDiagnosis
from compare.diagnosis.layer_group import LayerGroup, group_layers
from compare.diagnosis.mistake import Value, is_list
from minimax_tools.errors import format_count
from minimax_tools.model.formulas import FORMULAS
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import Blame, Verdict
from reports.wording import word_figure, word_sites

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
