"""Plant: one mistake, with its parameters, where in a layer it lives, and the arithmetic that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from faults.arithmetic import Arithmetic
from faults.stages import FusedWeights
from minimax_tools.model.sites import Site


class Kind(str, Enum):
    """What a plant counts as."""

    CATALOGUED = "catalogued"  # a mistake with a name that the diagnosis knows
    UNCATALOGUED = "uncatalogued"  # a mistake that only its site can tell of
    PAIR = "pair"  # two mistakes, of which the second lies behind the first
    EQUIVALENT = "equivalent"  # no mistake: what the layer gives is the same

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Plant:
    """What is planted.

    Args:
        name: In the spelling of the diagnosis, where it has the mistake.
        sites: Where it lives: the sites that are wrong though all they are computed from is right.
        arithmetic: What makes it.
        parameters: Of the mistake.
        kind: What it counts as.
        hides: Sites that the port does not show.
        prefills: Whether it shows where all rows are computed at once.
        decodes: Whether it is also planted in decode rows alone.
        needs_left_padding: Whether it shows only where rows are padded on the left.
        needs_far_positions: Whether it shows only where rows begin far from position 0.
        needs_fp8: Whether it is a mistake in reading FP8 codes and scales, which a BF16 checkpoint has not.
        halves: The two mistakes of a pair.
        akin: Of a mistake without a name of its own, names of the diagnosis that state the same computation.
    """

    name: str
    sites: tuple[Site, ...]
    arithmetic: type[Arithmetic]
    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    _: KW_ONLY
    kind: Kind = Kind.CATALOGUED
    hides: tuple[Site, ...] = ()
    prefills: bool = True
    decodes: bool = False
    needs_left_padding: bool = False
    needs_far_positions: bool = False
    needs_fp8: bool = False
    halves: tuple[Plant, ...] = ()
    akin: tuple[str, ...] = ()

    def build(self, config: Any, weights: FusedWeights) -> Arithmetic:
        """The arithmetic of a layer with this mistake."""
        return self.arithmetic(config, weights, **self.parameters)

    @property
    def record(self) -> dict[str, Any]:
        """Fields of a case that tell what was planted."""
        return {
            "kind": str(self.kind),
            "mistake": self.name,
            "parameters": {} if self.halves else dict(self.parameters),
            "sites": tuple(map(str, self.sites)),
        }

    def __str__(self) -> str:
        if not self.parameters or self.halves:
            return self.name
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.parameters.items())})"
