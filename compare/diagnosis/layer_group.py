"""LayerGroup: layers that one mistake explains, or that nothing does, so that a report tells them once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compare.diagnosis.finding import LayerDiagnosis, MistakeFinding

# Fitted parameters of one mistake differ a little from layer to layer.
_SAME_VALUE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share a finding.

    Args:
        layers: What was found of each, ascending.
        named: The mistake that explains them, as each of them has it; empty where nothing explains them.
        others: Mistakes that resemble it in some of them, or come nearest where nothing explains them; each as the
            layers have it, the commonest first.
    """

    layers: tuple[LayerDiagnosis, ...]
    named: tuple[MistakeFinding, ...]
    others: tuple[tuple[MistakeFinding, ...], ...]

    @property
    def is_right(self) -> bool:
        """True where nothing is to explain."""
        return self.layers[0].is_right

    @property
    def numbers(self) -> tuple[int, ...]:
        """The layers' numbers."""
        return tuple(layer.layer for layer in self.layers)


def group_layers(layers: Iterable[LayerDiagnosis]) -> tuple[LayerGroup, ...]:
    """Group layers by what explains them, in the order of the first of each.

    A mistake that resembles the best one of a layer explains it as well: a layer belongs to the first group whose
    mistake is among its named ones. Layers that nothing explains belong together where the same mistake comes nearest.
    """
    groups: list[list[tuple[LayerDiagnosis, MistakeFinding | None]]] = []
    for layer in layers:
        for members in groups:
            first, shared = members[0]
            if first.is_right and layer.is_right:
                members.append((layer, None))
                break
            if bool(first.named) is bool(layer.named) and not (first.is_right or layer.is_right):
                match = _find_alike(shared, layer.named or layer.nearest[:1])
                if match is not None or (shared is None and not layer.nearest):
                    members.append((layer, match))
                    break
        else:
            groups.append([(layer, next(iter(layer.named or layer.nearest), None))])
    return tuple(_group(members) for members in groups)


def gather(findings: Iterable[MistakeFinding]) -> tuple[tuple[MistakeFinding, ...], ...]:
    """Gather findings by mistake and parameters, the commonest first."""
    gathered: list[list[MistakeFinding]] = []
    for finding in findings:
        for members in gathered:
            if _are_alike(members[0], finding):
                members.append(finding)
                break
        else:
            gathered.append([finding])
    return tuple(tuple(members) for members in sorted(gathered, key=len, reverse=True))


def _group(members: Sequence[tuple[LayerDiagnosis, MistakeFinding | None]]) -> LayerGroup:
    is_named = bool(members[0][0].named)
    return LayerGroup(
        layers=tuple(layer for layer, _ in members),
        named=tuple(match for _, match in members if is_named and match is not None),
        others=gather(
            other
            for layer, match in members
            for other in layer.named or layer.nearest
            if not is_named or other is not match
        ),
    )


def _find_alike(shared: MistakeFinding | None, findings: Iterable[MistakeFinding]) -> MistakeFinding | None:
    if shared is None:
        return None
    return next((finding for finding in findings if _are_alike(shared, finding)), None)


def _are_alike(first: MistakeFinding, second: MistakeFinding) -> bool:
    """Decide whether two findings are one mistake with about the same parameters."""
    if first.mistake != second.mistake or first.parameters.keys() != second.parameters.keys():
        return False
    return all(
        math.isclose(value, other, rel_tol=_SAME_VALUE)
        if isinstance(value, float) and isinstance(other, float)
        else value == other
        for value, other in ((value, second.parameters[name]) for name, value in first.parameters.items())
    )
