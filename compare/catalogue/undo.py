"""Undo: a mistake of the catalogue with its parameters, to be undone in a port; `mm2-test --undo` takes it as text.

gate_up_swapped        k_norm_scaled,factor=0.353553        q_heads_interleaved,order=by group
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from compare.catalogue.candidates import Parameters, Value, nothing_listed
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.mistake import Hypothesis, Mistake
from compare.catalogue.repairs import Repair, Tensors, repair_lines, takes
from compare.catalogue.words import Place, require_known
from minimax_tools.errors import UsageError
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import LayerInputs

# Digits of a fitted parameter: more than a fit is sure of, and few enough to read.
_DIGITS = 6
# Share by which a fitted factor may miss a number of ranks.
_NEAR = 0.01


@dataclass(frozen=True, slots=True)
class Undo:
    """A mistake to undo.

    Raises:
        UsageError: No mistake of a layer has the name, or it takes other parameters.
    """

    name: str
    parameters: tuple[tuple[str, Value], ...] = ()

    def __post_init__(self) -> None:
        rounded = tuple((name, _rounded(value)) for name, value in self.parameters)
        object.__setattr__(self, "parameters", rounded)
        signature = inspect.signature(self.mistake.build)
        try:
            signature.bind(**dict(rounded))
        except TypeError as error:
            raise _other_parameters(self, list(signature.parameters)) from error

    @classmethod
    def parse(cls, text: str) -> Undo:
        """Parse a mistake with its parameters, `name,parameter=value,…`.

        Raises:
            UsageError: A parameter has no value, or as the constructor raises.
        """
        name, *parts = text.split(",")
        pairs = [part.partition("=") for part in parts]
        if not all(equals for _, equals, _ in pairs):
            raise UsageError(
                f"--undo {text!r} cannot be read",
                expected="a mistake, and its parameters as name=value behind commas",
                next_step="mm2-diagnose --list shows the mistakes.",
            )
        return cls(name.strip(), tuple((key.strip(), _parse_value(value)) for key, _, value in pairs))

    @property
    def mistake(self) -> Mistake:
        """The entry of the catalogue."""
        require_known((self.name,), places=(Place.LAYER,))
        return CATALOGUE[self.name]

    def is_in_weights(self, graph: ModelGraph) -> bool:
        """Decide whether a change of the layer's tensors undoes it in a model of a graph."""
        return self._repair is not None and self.mistake.has_repair(graph)

    @property
    def hypothesis(self) -> Hypothesis:
        """The hypothesis that the port made this mistake."""
        return self.mistake.with_parameters(dict(self.parameters))

    def lines(self, family: Family) -> tuple[str, ...]:
        """Return the lines for `convert_state_dict` of a family's port; () if no change of the tensors undoes it."""
        repair = self._repair
        return () if repair is None else repair_lines(repair, dict(self.parameters), family)

    def may_show(self, inputs: LayerInputs) -> bool:
        """Decide whether the mistake can show on a layer and its tokens.

        Raises:
            UsageError: The parameters are of another kind than those that are tried on this layer.
        """
        mistake = self.mistake
        if not mistake.fits(inputs.spec.graph):
            return False
        candidates, kinds = mistake.candidates(inputs), _kinds(dict(self.parameters))
        is_listed = any(kinds == _kinds(candidate) for candidate in candidates)
        if candidates and not is_listed and not mistake.finds_more:
            raise _other_parameters(self, candidates[0])
        return bool(candidates) or mistake.candidates is nothing_listed

    def may_lie_before(self, shown: Collection[Site]) -> bool:
        """Decide whether it is a fitted factor on a sum of a layer that is not among the sites that a port shows.

        Experts that read a little too much give nearly such a sum. A number of ranks comes of the sum itself.
        """
        sites = self.hypothesis.sites
        factor = dict(self.parameters).get("factor")
        if (
            sites & set(shown)
            or not sites <= {Site.ATTN_DELTA, Site.MOE_DELTA}
            or not isinstance(factor, float)
        ):
            return False
        ranks = max(abs(factor), 1 / abs(factor)) if factor else 0.0
        return factor < 0 or round(ranks) < 2 or abs(ranks / round(ranks) - 1) > _NEAR

    def edit(self, tensors: Tensors, config: Any) -> None:
        """Undo it in a layer's tensors, by mm2's relative names, in place; `config` has the sizes by mm2's names."""
        repair = self._repair
        assert repair is not None, "only mistakes with a repair are undone in the tensors"
        repair(tensors, config, **dict(self.parameters))

    @property
    def _repair(self) -> Repair | None:
        repair = self.mistake.repair
        return repair if repair is not None and takes(repair, dict(self.parameters)) else None

    def __str__(self) -> str:
        return ",".join((self.name, *(f"{name}={value}" for name, value in self.parameters)))


def undo_finding(name: str, parameters: Mapping[str, Value]) -> tuple[Undo, ...]:
    """Return the mistakes of a finding: of `a + b` two, whose parameters begin with their names, as `a.factor`."""
    names = name.split(" + ")
    if len(names) == 1:
        return (Undo(name, tuple(parameters.items())),)
    return tuple(
        Undo(
            one,
            tuple(
                (key.removeprefix(f"{one}."), value)
                for key, value in parameters.items()
                if key.startswith(f"{one}.")
            ),
        )
        for one in names
    )


def join_hypotheses(undone: Iterable[Undo]) -> Hypothesis:
    """Return the hypothesis that the port made all of these mistakes."""
    return reduce(Hypothesis.and_also, (undo.hypothesis for undo in undone))


def _kinds(parameters: Parameters) -> dict[str, bool]:
    return {name: isinstance(value, str) for name, value in parameters.items()}


def _other_parameters(undo: Undo, expected: Iterable[str]) -> UsageError:
    return UsageError(
        f"--undo {undo} has other parameters than the mistake",
        expected=", ".join(expected) or "none",
        found=", ".join(f"{name}={value}" for name, value in undo.parameters) or "none",
        next_step="Give them as mm2-diagnose names them: --undo k_norm_scaled,factor=0.5.",
    )


def _parse_value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip()


def _rounded(value: Value) -> Value:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
