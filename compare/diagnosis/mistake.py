"""Mistake: an entry of the catalogue: what a port may have done, as a change of the layer, with its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from compare.diagnosis.evaluation import Change, LayerInputs
from minimax_tools.model.sites import Site

# What a mistake is computed from: the inputs of a layer, or of a site outside the layers.
Scene = TypeVar("Scene")
Value = int | float | str
Parameters = Mapping[str, Value]
# The parameters that are worth a try in a scene; none where the mistake cannot happen there.
Candidates = Callable[[LayerInputs], tuple[Parameters, ...]]

NOTHING: Parameters = MappingProxyType({})


def once(_: object) -> tuple[Parameters, ...]:
    """Offer no parameters, once."""
    return (NOTHING,)


def once_if(may_happen: Callable[[Scene], bool]) -> Callable[[Scene], tuple[Parameters, ...]]:
    """Build candidates of a mistake without parameters: one in scenes where it may happen."""
    return lambda scene: (NOTHING,) if may_happen(scene) else ()


def each(name: str, values: Callable[[Scene], Iterable[Value]]) -> Callable[[Scene], tuple[Parameters, ...]]:
    """Build candidates of one parameter: every value that a scene allows."""
    return lambda scene: tuple(MappingProxyType({name: value}) for value in values(scene))


def values_of(name: str, *values: Value) -> Callable[[object], tuple[Parameters, ...]]:
    """Build candidates of one parameter, with the same values everywhere."""
    return each(name, lambda _: values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A known porting mistake.

    Args:
        name: Its name, as reports give it.
        what: What the port does, in a sentence.
        look_at: What to look at in the port's code.
        sources: Public threads that report it, `repository#thread`.
        build: From its parameters, by name, to the change.
        candidates: The parameters to try.
        fitted: The parameter that is searched between the candidates, on a logarithmic scale; None for none.
        is_whole: Whether that parameter is a whole number.
        is_rounding: Whether it rounds values that BF16 noise reaches: its error hangs on their last bits, and can be
            foretold in part alone.
    """

    name: str
    what: str
    look_at: str
    build: Callable[..., Change]
    candidates: Candidates = once
    sources: tuple[str, ...] = ()
    fitted: str | None = None
    is_whole: bool = False
    is_rounding: bool = False

    def hypotheses(self, scene: LayerInputs) -> tuple[Hypothesis, ...]:
        """Return this mistake with each of its candidates."""
        return tuple(self.with_parameters(parameters) for parameters in self.candidates(scene))

    def with_parameters(self, parameters: Parameters) -> Hypothesis:
        """Return this mistake with given parameters."""
        return Hypothesis(mistakes=(self,), parameters=(parameters,), change=self.build(**parameters))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hypothesis:
    """A mistake, or two that happened together, with their parameters.

    Args:
        parameters: Those of each.
        change: What they change, taken together.
    """

    mistakes: tuple[Mistake, ...]
    parameters: tuple[Parameters, ...]
    change: Change

    @property
    def name(self) -> str:
        """The mistakes' names."""
        return " + ".join(mistake.name for mistake in self.mistakes)

    @property
    def sites(self) -> frozenset[Site]:
        """The sites at which it first shows."""
        return self.change.sites

    @property
    def is_rounding(self) -> bool:
        """Return whether it is one mistake, which rounds values."""
        return len(self.mistakes) == 1 and self.mistakes[0].is_rounding

    @property
    def is_of_attention(self) -> bool:
        """True where it begins before the norm of the experts: pairs are of one that does and one that does not."""
        return min(site.order for site in self.sites) < Site.POST_NORM.order

    def and_also(self, other: Hypothesis) -> Hypothesis:
        """Join two hypotheses."""
        return Hypothesis(
            mistakes=(*self.mistakes, *other.mistakes),
            parameters=(*self.parameters, *other.parameters),
            change=self.change.and_also(other.change),
        )

    def __str__(self) -> str:
        return " + ".join(
            word_mistake(mistake.name, parameters)
            for mistake, parameters in zip(self.mistakes, self.parameters, strict=True)
        )


def word_mistake(name: str, parameters: Parameters) -> str:
    """Word a mistake and its parameters, as in `rope_theta (theta 1e+04)`."""
    words = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in parameters.items()
    ]
    return f"{name} ({', '.join(words)})" if words else name
