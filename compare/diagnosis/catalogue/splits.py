"""Splits: parameters that say how a width, or the experts, are spread over ranks."""

from __future__ import annotations

from types import MappingProxyType

from compare.diagnosis.evaluation import LayerInputs
from compare.diagnosis.mistake import Candidates, Parameters

_DEGREES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
# Of larger groups only the first rank is tried, whose output a port shows.
MOST_RANKS = 8


def degrees(size: int) -> tuple[int, ...]:
    """List the numbers of ranks that a size may be spread over."""
    return tuple(degree for degree in _DEGREES if degree <= size and size % degree == 0)


def rank_of(degree_name: str, quantity: str) -> Candidates:
    """Build candidates of a degree and one of its ranks, over a quantity of the model."""

    def candidates(scene: LayerInputs) -> tuple[Parameters, ...]:
        return tuple(
            MappingProxyType({degree_name: degree, "rank": rank})
            for degree in degrees(getattr(scene.spec, quantity))
            for rank in (range(degree) if degree <= MOST_RANKS else range(1))
        )

    return candidates


def share(size: int, degree: int, rank: int) -> slice:
    """Return the part of a size that a rank holds."""
    return slice(rank * size // degree, (rank + 1) * size // degree)
