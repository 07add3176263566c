"""Plant: a mistake, or a harmless change, that is put into a right port on purpose to test what mm2 says of it.

A plant replaces stages of the right `Arithmetic` by functions. Each gets the right stage, the layer's arithmetic, the
stage's arguments, and the plant's parameters by name:

    Plant("attention_scale", sites, {"attention_scores": _scaled_scores}, {"factor": 0.8})

    def _scaled_scores(right: Stage, _: Arithmetic, q: Tensor, k: Tensor, *, factor: float) -> Tensor:
        return right(q, k) * factor
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from faults.arithmetic import Arithmetic, FusedWeights, KeyValues, Tap
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.text_enum import TextEnum

Tensor = torch.Tensor
Stage = Callable[..., Any]
Change = Callable[[Tensor], Tensor]
State = dict[str, Tensor]  # the fused weights, which the stage `fuse` returns


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
    # Sites of the mistake: wrong although their inputs are right. In all models routed_delta is the sum of the routed
    # experts, and sites that a model lacks are left out (see `on`).
    sites: tuple[Site, ...]
    # The wrong stages, by the names of the methods of `Arithmetic`. Their addresses must not be in a journal's keys.
    stages: Mapping[str, Stage] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    _: KW_ONLY
    kind: Kind = Kind.CATALOGUED
    hides: tuple[Site, ...] = ()  # sites that the port does not show: they differ though its output is right
    prefills: bool = True  # whether it is planted in runs that prefill, which compute all tokens at once
    decodes: bool = False  # whether it is also planted in decoded tokens alone, after a right prefill
    needs_left_padding: bool = False  # whether it shows only if prompts are padded on the left
    needs_far_positions: bool = False  # whether it shows only if prompts begin far from position 0
    needs_fp8: bool = False  # whether it is a mistake in reading an FP8 checkpoint
    # Options of `ModelGraph`, by name, that a model must have for it to change anything.
    only_with: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    halves: tuple[Plant, ...] = ()  # the two plants of a pair
    # For an uncatalogued mistake: catalogued ones that compute nearly the same, which the diagnosis may answer with.
    akin: tuple[str, ...] = ()
    told: str = ""  # words of a blame that tell the mistake without a name, such as what weights stand where others do

    def build(self, config: Any, weights: FusedWeights, layer_idx: int) -> Arithmetic:
        """Build the arithmetic of a layer with this mistake."""
        arithmetic = Arithmetic(config, weights, layer_idx)
        for plant in self.halves or (self,):
            for name, stage in plant.stages.items():
                right = getattr(arithmetic, name)
                setattr(arithmetic, name, partial(stage, right, arithmetic, **plant.parameters))
        return arithmetic

    def fits(self, graph: ModelGraph) -> bool:
        """Decide whether it changes anything in a model, and at sites that the model has."""
        return graph.has(self.only_with) and bool(self.on(graph).sites)

    def on(self, graph: ModelGraph) -> Plant:
        """Return the plant with its sites in a model."""
        routed = graph.layer(0).routed_sum

        def held(sites: tuple[Site, ...]) -> tuple[Site, ...]:
            found = (routed if site is Site.ROUTED_DELTA else site for site in sites)
            return tuple(site for site in found if site in graph.sites)

        return replace(self, sites=held(self.sites), hides=held(self.hides))

    @property
    def record(self) -> dict[str, Any]:
        """The fields of a `PlantedCase` that describe the plant."""
        return {
            "kind": str(self.kind),
            "mistake": self.name,
            "parameters": dict(self.parameters),
            "sites": tuple(map(str, self.sites)),
        }

    def __str__(self) -> str:
        if not self.parameters:
            return self.name
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.parameters.items())})"


def replace_stages(name: str, sites: tuple[Site, ...], *akin: str, **stages: Stage) -> Plant:
    """Build an uncatalogued plant; `akin` are names of the catalogue that are true of it."""
    return Plant(name, sites, stages, kind=Kind.UNCATALOGUED, akin=akin)


def replace_site(name: str, site: Site, change: Change, *akin: str) -> Plant:
    """Build a plant that goes on with `change(value)` at a site."""

    def run(
        right: Stage,
        _: Any,
        states: Tensor,
        mask: Tensor,
        positions: Tensor,
        past: KeyValues | None,
        tap: Tap,
    ) -> Any:
        def changing(shown: str, value: Tensor) -> Tensor:
            return tap(shown, change(value).to(value.dtype) if shown == str(site) else value)

        return right(states, mask, positions, past, changing)

    return replace_stages(name, (site,), *akin, run=run)


def replace_weights(
    name: str, sites: tuple[Site, ...], change: Callable[[LayerTensors, Any], None], *akin: str
) -> Plant:
    """Build a plant that changes the hub's tensors before they are fused."""
    return replace_stages(name, sites, *akin, edit=in_tensors(change))


def replace_fused(name: str, change: Callable[[State], Any], *akin: str) -> Plant:
    """Build a plant that changes the experts' fused weights."""
    return replace_stages(name, (Site.MOE_DELTA,), *akin, fuse=in_fused(change))


def in_tensors(change: Callable[..., None]) -> Stage:
    """Build the stage `edit` that changes the hub's tensors: `change` gets them, the config, and the parameters."""

    def edit(right: Stage, layer: Arithmetic, tensors: LayerTensors, **parameters: Any) -> None:
        right(tensors)
        change(tensors, layer.config, **parameters)

    return edit


def in_fused(change: Callable[[State], Any]) -> Stage:
    """Build the stage `fuse` that changes the fused weights in place."""

    def fuse(right: Callable[[LayerTensors], State], _: Arithmetic, tensors: LayerTensors) -> State:
        state = right(tensors)
        change(state)
        return state

    return fuse


def scaled(factor: float) -> Change:
    """Build the change that multiplies a value by a factor."""
    return lambda value: factor * value


def on_half(change: Change, dim: int) -> Change:
    """Change the second half of a dim alone."""

    def changed(value: Tensor) -> Tensor:
        first, second = value.chunk(2, dim)
        return torch.cat((first, change(second).to(value.dtype)), dim)

    return changed


_MOE = frozenset(
    {
        *(Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS),
        *(Site.ROUTED_DELTA, Site.SHARED_DELTA, Site.MOE_DELTA),
    }
)
# Sites between or behind attention and experts: a mistake there belongs to neither half of a pair.
_BETWEEN = frozenset({Site.ATTN_RESIDUAL, Site.POST_NORM, Site.OUTPUT})


def fit_plants(plants: Sequence[Plant], graph: ModelGraph) -> tuple[Plant, ...]:
    """Choose the plants that change something in a model, with their sites there."""
    return tuple(plant.on(graph) for plant in plants if plant.fits(graph))


def pair_plants(plants: Sequence[Plant], *, seed: int) -> Iterator[Plant]:
    """Pair each plant of the attention with a random one of the experts, if both show in any prefill with all sites."""
    pairable = [
        plant
        for plant in plants
        if plant.kind is not Kind.EQUIVALENT
        and plant.prefills
        and not (plant.needs_left_padding or plant.needs_far_positions)
        and not plant.hides
    ]
    attention = [plant for plant in pairable if not set(plant.sites) & (_MOE | _BETWEEN)]
    moe = [plant for plant in pairable if set(plant.sites) <= _MOE]
    generator = random.Random(seed)
    for first in attention:
        second = generator.choice(moe)
        sites = (*first.sites, *second.sites)
        yield Plant(f"{first} + {second}", sites, kind=Kind.PAIR, halves=(first, second))
