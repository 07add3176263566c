"""LayerGroup: layers that one mistake explains, or that nothing explains at the same sites, told together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from compare.blame.blame import join_causes
from compare.catalogue.candidates import is_list
from compare.catalogue.catalogue import CATALOGUE
from compare.diagnosis.finding import LayerDiagnosis, MistakeFinding, PassedOver
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import Blame

# Standard errors by which the values of one number of the model may differ between two layers.
_MOST_ERRORS = 4.0
# Relative difference up to which fitted parameters are the same: they differ a little from layer to layer. Factors are
# found more precisely.
_SAME_VALUE, _SAME_FACTOR = 0.05, 0.003
# Share of a layer's error from which a mistake without a number nearly explains it.
_NEARLY_EXPLAINED = 0.95
_FACTOR = "factor"  # name of the fitted parameter of a mistake that multiplies by one number


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share a finding."""

    diagnoses: tuple[LayerDiagnosis, ...]  # diagnoses of the layers, ascending
    named: tuple[MistakeFinding, ...]  # findings of the shared mistake; empty if nothing explains the layers
    others: tuple[tuple[MistakeFinding, ...], ...]

    @property
    def first(self) -> LayerDiagnosis:
        """The first layer, which stands for all: if nothing explains them, the blame of all names the same sites."""
        return self.diagnoses[0]

    @property
    def is_right(self) -> bool:
        """True if there is nothing to explain in these layers."""
        return self.first.is_right

    @property
    def is_of_weights(self) -> bool:
        """True if wrong weights explain all that is blamed here."""
        return bool(self.first.blame) and all(blame.is_of_weights for blame in self.first.blame)

    @property
    def causes(self) -> tuple[tuple[Blame, ...], ...]:
        """The causes in the first layer, each with the blame of its sites."""
        return join_causes(self.first.blame)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the layers."""
        return tuple(diagnosis.layer for diagnosis in self.diagnoses)


def group_layers(diagnoses: Iterable[LayerDiagnosis]) -> tuple[LayerGroup, ...]:
    """Group layers: right ones, those with one mistake, and those that nothing explains at the same sites."""
    groups: list[list[LayerDiagnosis]] = []
    for diagnosis in diagnoses:
        for group in groups:
            if _belong_together(group[0], diagnosis):
                group.append(diagnosis)
                break
        else:
            groups.append([diagnosis])
    return tuple(_summarise(group) for group in groups)


def withdraw_unequal(diagnoses: Sequence[LayerDiagnosis]) -> tuple[LayerDiagnosis, ...]:
    """Take back the mistakes of one number of the model that would need another in each layer: they are none."""
    values: dict[str, list[MistakeFinding]] = {}
    for diagnosis in diagnoses:
        for finding in diagnosis.named:
            mistake = CATALOGUE.get(finding.mistake)
            # A factor, too, is one number of the model.
            if mistake is not None and (mistake.is_constant or mistake.is_factor):
                values.setdefault(finding.mistake, []).append(finding)
    unequal = {name for name, findings in values.items() if _is_unequal(findings)}
    return tuple(_withdrawn(diagnosis, unequal, partial(_word_unequal, values)) for diagnosis in diagnoses)


def withdraw_rare(
    diagnoses: Sequence[LayerDiagnosis], passed_over: Sequence[PassedOver]
) -> tuple[LayerDiagnosis, ...]:
    """Take back a mistake that explains no more layers than it leaves at the same sites: it fits by chance."""
    at_place: dict[object, list[LayerDiagnosis]] = {}
    for diagnosis in diagnoses:
        if not diagnosis.is_right:
            at_place.setdefault(diagnosis.place, []).append(diagnosis)
    changed: dict[int, LayerDiagnosis] = {}
    for alike in at_place.values():
        counts = Counter(name for one in alike for name in {finding.mistake for finding in one.named})
        left = {name: _layers_left(name, alike, passed_over) for name in counts}
        rare = {name for name, count in counts.items() if count <= len(left[name])}
        for diagnosis in alike:
            changed[id(diagnosis)] = _withdrawn(diagnosis, rare, partial(_word_rare, left))
    return tuple(changed.get(id(diagnosis), diagnosis) for diagnosis in diagnoses)


def _layers_left(
    name: str, alike: Sequence[LayerDiagnosis], passed_over: Sequence[PassedOver]
) -> tuple[int, ...]:
    """Return the layers that nothing explains, a mistake of this name neither; those that it nearly explains aside."""
    unexplained = {
        diagnosis.layer for diagnosis in alike if not diagnosis.named and not _is_near(name, diagnosis)
    }
    passed = {layer for one in passed_over if unexplained.intersection(one.like) for layer in one.layers}
    return tuple(sorted(unexplained | passed))


def _is_near(name: str, diagnosis: LayerDiagnosis) -> bool:
    """Decide whether a mistake takes most of a layer's error away; one with a number may do so by chance."""
    mistake = CATALOGUE.get(name)
    if mistake is None or mistake.fitted is not None or mistake.finds_more:
        return False
    return any(
        finding.mistake == name and finding.explains >= _NEARLY_EXPLAINED for finding in diagnosis.nearest
    )


def _is_unequal(findings: Sequence[MistakeFinding]) -> bool:
    """Decide whether the fitted parameter of a mistake differs between layers by more than its uncertainty."""
    name = str(CATALOGUE[findings[0].mistake].fitted)
    numbers = sorted((math.log(float(finding.parameters[name])), max(finding.z, 1.0)) for finding in findings)
    (least, first_z), (most, second_z) = numbers[0], numbers[-1]
    if name == _FACTOR:
        # The effect of a factor vanishes at 1: its error is a share of its distance from there.
        errors, same = abs(least) / first_z + abs(most) / second_z, _SAME_FACTOR
    else:
        errors, same = 1.0 / first_z + 1.0 / second_z, _SAME_VALUE
    return most - least > max(same, _MOST_ERRORS * errors)


def _withdrawn(
    diagnosis: LayerDiagnosis, names: set[str], word: Callable[[Sequence[MistakeFinding]], str]
) -> LayerDiagnosis:
    """Return a diagnosis with the mistakes of these names among the nearest, and a note why; itself if it has none."""
    taken = tuple(finding for finding in diagnosis.named if finding.mistake in names)
    if not taken:
        return diagnosis
    return replace(
        diagnosis,
        named=tuple(finding for finding in diagnosis.named if finding.mistake not in names),
        nearest=(*taken, *diagnosis.nearest),
        notes=(*diagnosis.notes, word(taken)),
    )


def _word_unequal(values: Mapping[str, Sequence[MistakeFinding]], taken: Sequence[MistakeFinding]) -> str:
    told = []
    for name in dict.fromkeys(finding.mistake for finding in taken):
        parameter = str(CATALOGUE[name].fitted)
        numbers = sorted(float(finding.parameters[parameter]) for finding in values[name])
        span = f"{numbers[0]:.4g} to {numbers[-1]:.4g}"
        told.append(f"{name} comes near, but would need another {parameter} in each layer: {span}")
    return "; ".join(told)


def _word_rare(left: Mapping[str, Sequence[int]], taken: Sequence[MistakeFinding]) -> str:
    names = tuple(dict.fromkeys(finding.mistake for finding in taken))
    layers = word_layers(sorted({layer for name in names for layer in left[name]}))
    return f"{' and '.join(names)} comes near here alone: at the same sites of {layers} it explains nothing"


def _belong_together(first: LayerDiagnosis, second: LayerDiagnosis) -> bool:
    if first.is_right or second.is_right:
        return first.is_right and second.is_right
    if not first.named or not second.named:
        is_alike = (first.place, first.is_of_shape) == (second.place, second.is_of_shape)
        return not first.named and not second.named and is_alike
    # Of `first` the best finding counts: it is the group's.
    return any(_are_alike(first.named[0], candidate) for candidate in second.named)


def _summarise(diagnoses: list[LayerDiagnosis]) -> LayerGroup:
    named: list[MistakeFinding] = []
    others: list[MistakeFinding] = []
    for diagnosis in diagnoses:
        if not diagnosis.named:
            continue
        shared = diagnoses[0].named[0]
        match = next(finding for finding in diagnosis.named if _are_alike(shared, finding))
        named.append(match)
        others += [finding for finding in diagnosis.named if finding is not match]
    return LayerGroup(diagnoses=tuple(diagnoses), named=tuple(named), others=gather_alike(others))


def gather_alike(findings: Iterable[MistakeFinding]) -> tuple[tuple[MistakeFinding, ...], ...]:
    """Gather findings by mistake and parameters, the commonest first."""
    gathered: list[list[MistakeFinding]] = []
    for finding in findings:
        for alike in gathered:
            if _are_alike(alike[0], finding):
                alike.append(finding)
                break
        else:
            gathered.append([finding])
    return tuple(tuple(alike) for alike in sorted(gathered, key=len, reverse=True))


def _are_alike(first: MistakeFinding, second: MistakeFinding) -> bool:
    if first.mistake != second.mistake or first.parameters.keys() != second.parameters.keys():
        return False
    for name, value in first.parameters.items():
        other = second.parameters[name]
        if is_list(value) and is_list(other):
            continue
        if isinstance(value, float) and isinstance(other, float):
            if not math.isclose(value, other, rel_tol=_SAME_VALUE):
                return False
        elif value != other:
            return False
    return True
