"""Plant: one mistake with its parameters, its sites and its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any

from faults.arithmetic import Arithmetic
from faults.stages import FusedWeights
from minimax_tools.model.sites import Site
from minimax_tools.text_enum import TextEnum


class Kind(TextEnum):
    """Kind of a plant."""

    CATALOGUED = "catalogued"  # a mistake that the diagnosis has a name for
    UNCATALOGUED = "uncatalogued"  # a mistake that it has no name for
    PAIR = "pair"  # a mistake of the attention and one of the experts
    EQUIVALENT = "equivalent"  # no mistake: the layer's output is the same


@dataclass(frozen=True, slots=True)
class Plant:
    """A mistake that is planted.

    Args:
        name: Name of the mistake; the diagnosis's, if it has one.
        sites: Sites of the mistake: wrong although their inputs are right.
        arithmetic: Class of the wrong arithmetic.
        parameters: Parameters of the arithmetic, by name.
        kind: Kind of the mistake.
        hides: Sites that the port does not show.
        prefills: Whether the mistake shows in a prefill, which computes all rows at once.
        decodes: Whether it is also planted in decoded rows alone.
        needs_left_padding: Whether it shows only if rows are padded on the left.
        needs_far_positions: Whether it shows only if rows begin far from position 0.
        needs_fp8: Whether it is a mistake in reading an FP8 checkpoint.
        halves: The two mistakes of a pair.
        akin: Names that the diagnosis has for the same computation, if it has none for the mistake.
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
        """Build the arithmetic of a layer with this mistake."""
        return self.arithmetic(config, weights, **self.parameters)

    @property
    def record(self) -> dict[str, Any]:
        """The fields of a `PlantedCase` that describe the plant."""
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
