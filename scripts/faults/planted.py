"""Plants: mistakes that the diagnosis has a name for, mistakes that it has none for, and changes that are none."""

from __future__ import annotations

from collections.abc import Iterable

from faults import attention, equivalents, experts, uncatalogued
from faults.plant import Plant
from minimax_tools.errors import UsageError

MISTAKES: tuple[Plant, ...] = (*attention.PLANTS, *experts.PLANTS, *uncatalogued.PLANTS)
EQUIVALENTS: tuple[Plant, ...] = equivalents.PLANTS
PLANTS = (*MISTAKES, *EQUIVALENTS)


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
