"""Candidates: the parameters of a mistake that are tried on a layer, or on a site outside the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol, TypeVar

from minimax_tools.model.spec import ModelSpec

# Inputs of a layer, or of a site outside the layers.
AnyInputs = TypeVar("AnyInputs")
Value = int | float | str
Parameters = Mapping[str, Value]

NO_PARAMETERS: Parameters = MappingProxyType({})
# Length of a parameter's text, beyond which it lists a number for each expert or token.
_LONGEST_TEXT = 40
# Numbers of ranks that are tried: powers of two, and three times those.
_DEGREES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
# With more ranks than these only rank 0 is tried: it is the one whose output a port shows.
_MOST_RANKS = 8


def is_list(value: Value) -> bool:
    """Decide whether a parameter lists numbers of each expert or token: they differ from layer to layer."""
    return isinstance(value, str) and len(value) > _LONGEST_TEXT


def once(_: object) -> tuple[Parameters, ...]:
    """Return the one candidate of a mistake without parameters."""
    return (NO_PARAMETERS,)


def once_if(may_show: Callable[[AnyInputs], bool]) -> Callable[[AnyInputs], tuple[Parameters, ...]]:
    """Build the candidates of a mistake without parameters: it is tried on inputs on which it may show."""
    return lambda inputs: (NO_PARAMETERS,) if may_show(inputs) else ()


def each(
    name: str, values: Callable[[AnyInputs], Iterable[Value]]
) -> Callable[[AnyInputs], tuple[Parameters, ...]]:
    """Build the candidates of a mistake with one parameter: all `values` for the given inputs."""
    return lambda inputs: tuple(MappingProxyType({name: value}) for value in values(inputs))


def values_of(name: str, *values: Value) -> Callable[[object], tuple[Parameters, ...]]:
    """Build candidates of one parameter, with the same values on all inputs."""
    return each(name, lambda _: values)


def nothing_listed(_: object) -> tuple[Parameters, ...]:
    """Return no candidates: the port's values alone give the parameters."""
    return ()


class HasSpec(Protocol):
    """Inputs that know their model."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""


def degrees(size: int) -> tuple[int, ...]:
    """List the numbers of ranks that a size may be spread over: heads, experts, channels or vocabulary rows."""
    return tuple(degree for degree in _DEGREES if degree <= size and size % degree == 0)


def degree_of(degree_name: str, quantity: str) -> Callable[[HasSpec], tuple[Parameters, ...]]:
    """Build candidates of a number of ranks, such as `tp_degree`, over a quantity of `ModelSpec` as `hidden_size`."""
    return each(degree_name, lambda inputs: degrees(getattr(inputs.spec, quantity)))


def rank_of(degree_name: str, quantity: str) -> Callable[[HasSpec], tuple[Parameters, ...]]:
    """Build candidates of a number of ranks and one of these ranks, over a quantity of `ModelSpec`."""
    return lambda inputs: tuple(
        MappingProxyType({degree_name: degree, "rank": rank})
        for degree in degrees(getattr(inputs.spec, quantity))
        for rank in range(degree if degree <= _MOST_RANKS else 1)
    )


def share(size: int, degree: int, rank: int) -> slice:
    """Return the part of a size that a rank holds."""
    return slice(rank * size // degree, (rank + 1) * size // degree)


def rank_slices(size: int) -> Iterator[tuple[set[int], set[int]]]:
    """Yield what each rank holds of a size, and what all others do, for the numbers of ranks that are tried."""
    for degree in degrees(size):
        for rank in range(degree):
            held = set(range(size)[share(size, degree, rank)])
            yield held, set(range(size)) - held
