"""Splits: candidates of mistakes in parallelism: over how many ranks a size is spread, and which rank is meant.

A size is a number of heads, experts, channels or vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Protocol

from compare.diagnosis.mistake import Parameters, each
from minimax_tools.model.spec import ModelSpec

# Numbers of ranks that are tried: powers of two, and three times those.
_DEGREES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
# With more ranks than these only rank 0 is tried: it is the one whose output a port shows.
_MOST_RANKS = 8


class HasSpec(Protocol):
    """Inputs of a layer, or of a site outside the layers, that know their model."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""


def degrees(size: int) -> tuple[int, ...]:
    """List the numbers of ranks that a size may be spread over."""
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
