"""Plants: mistakes that the diagnosis has a name for, mistakes that it has none for, and changes that are none."""

from __future__ import annotations

from collections.abc import Iterable

from faults import (
    attention,
    equivalents,
    experts,
    fp8,
    norms,
    rotary,
    router,
    uncatalogued,
)
from faults.plant import Kind, Plant
from minimax_tools.errors import UsageError

PLANTS: tuple[Plant, ...] = (
    *norms.PLANTS,
    *rotary.PLANTS,
    *attention.PLANTS,
    *router.PLANTS,
    *experts.PLANTS,
    *fp8.PLANTS,
    *uncatalogued.PLANTS,
    *equivalents.PLANTS,
)
MISTAKES = tuple(plant for plant in PLANTS if plant.kind is not Kind.EQUIVALENT)
EQUIVALENTS = tuple(plant for plant in PLANTS if plant.kind is Kind.EQUIVALENT)


def choose_plants(names: Iterable[str]) -> tuple[Plant, ...]:
    """Choose the plants of these names, whatever their parameters; all if no name is given.

    Raises:
        UsageError: No plant has one of the names.
    """
    wanted = set(names)
    unknown = wanted - {plant.name for plant in PLANTS}
    if unknown:
        raise UsageError(
            f"nothing of the name {', '.join(sorted(unknown))} is planted",
            expected=", ".join(sorted({plant.name for plant in PLANTS})),
        )
    return tuple(plant for plant in PLANTS if not wanted or plant.name in wanted)
