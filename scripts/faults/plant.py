"""Plant: a mistake, or a harmless change, that is put into a right port on purpose to test what mm2 says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any

from faults.arithmetic import Arithmetic, FusedWeights
from minimax_tools.model.sites import Site
from minimax_tools.text_enum import TextEnum


class Kind(TextEnum):
    """Kind of a plant."""

    CATALOGUED = "catalogued"  # a mistake that the diagnosis has a name for
    UNCATALOGUED = "uncatalogued"  # a mistake that it has no name for: mm2 must find it all the same
    PAIR = "pair"  # two mistakes in one port, one in the attention and one in the router or the experts
    EQUIVALENT = "equivalent"  # no mistake: the layer's output stays the same, and mm2 must not fail it


@dataclass(frozen=True, slots=True)
class Plant:
    """A mistake, or a harmless change, that is planted in a layer."""

    name: str  # name of the mistake; the diagnosis's own name if it is catalogued
    sites: tuple[Site, ...]  # sites of the mistake: wrong although their inputs are right
    arithmetic: type[Arithmetic]  # the right arithmetic with the wrong stages overridden
    # Keyword arguments of `arithmetic`; those of a pair are its two plants.
    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    _: KW_ONLY
    kind: Kind = Kind.CATALOGUED
    hides: tuple[Site, ...] = ()  # sites that the port does not show: they differ though its output is right
    prefills: bool = True  # whether it is planted in runs that prefill, which compute all tokens at once
    decodes: bool = False  # whether it is also planted in decoded tokens alone, after a right prefill
    needs_left_padding: bool = False  # whether it shows only if prompts are padded on the left
    needs_far_positions: bool = False  # whether it shows only if prompts begin far from position 0
    needs_fp8: bool = False  # whether it is a mistake in reading an FP8 checkpoint
    halves: tuple[Plant, ...] = ()  # the two plants of a pair
    # For an uncatalogued mistake: catalogued ones that compute nearly the same, which the diagnosis may answer with.
    akin: tuple[str, ...] = ()
    told: str = ""  # words of a blame that tell the mistake without a name, such as what weights stand where others do

    def build(self, config: Any, weights: FusedWeights) -> Arithmetic:
        """Build the arithmetic of a layer with this mistake."""
        return self.arithmetic(config, weights, **self.parameters)

    @property
    def record(self) -> dict[str, Any]:
        """The fields of a `PlantedCase` that describe the plant."""
        return {
            "kind": str(self.kind),
            "mistake": self.name,
            # The parameters of a pair are plants: its name holds both with their own parameters.
            "parameters": {} if self.halves else dict(self.parameters),
            "sites": tuple(map(str, self.sites)),
        }

    def __str__(self) -> str:
        if not self.parameters or self.halves:
            return self.name
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.parameters.items())})"
