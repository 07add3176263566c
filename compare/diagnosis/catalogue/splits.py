"""Splits: parameters that say how a width, or the experts, are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Protocol

from compare.diagnosis.mistake import Parameters, each
from minimax_tools.model.spec import ModelSpec

_DEGREES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
# Of larger groups only the first rank is tried, whose output a port shows.
_MOST_RANKS = 8


class HasSpec(Protocol):
    """A scene that knows its model."""

    @property
    def spec(self) -> ModelSpec:
        """The model."""


def degrees(size: int) -> tuple[int, ...]:
    """List the numbers of ranks that a size may be spread over."""
    return tuple(degree for degree in _DEGREES if degree <= size and size % degree == 0)


def degree_of(degree_name: str, quantity: str) -> Callable[[HasSpec], tuple[Parameters, ...]]:
    """Build candidates of a degree, over a quantity of the model."""
    return each(degree_name, lambda scene: degrees(getattr(scene.spec, quantity)))


def rank_of(degree_name: str, quantity: str) -> Callable[[HasSpec], tuple[Parameters, ...]]:
    """Build candidates of a degree and one of its ranks, over a quantity of the model."""
    return lambda scene: tuple(
        MappingProxyType({degree_name: degree, "rank": rank})
        for degree in degrees(getattr(scene.spec, quantity))
        for rank in range(degree if degree <= _MOST_RANKS else 1)
    )


def share(size: int, degree: int, rank: int) -> slice:
    """Return the part of a size that a rank holds."""
    return slice(rank * size // degree, (rank + 1) * size // degree)
