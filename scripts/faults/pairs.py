"""Pairs of mistakes in one port: one in the attention, one in the router or the experts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from faults.arithmetic import Arithmetic, AttentionStages, FusedWeights, MoeStages
from faults.plant import Kind, Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site

_MOE = frozenset({Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS, Site.MOE_DELTA})
# Sites between or behind attention and experts: a mistake there belongs to neither half of a pair.
_BETWEEN = frozenset({Site.ATTN_RESIDUAL, Site.POST_NORM, Site.OUTPUT})


class PairArithmetic(Arithmetic):
    """The attention of one wrong port and the experts of another: their methods, set here, hide the right ones."""

    def __init__(self, config: Any, weights: FusedWeights, *, attention: Plant, moe: Plant) -> None:
        super().__init__(config, weights)
        self._halves = attention.build(config, weights), moe.build(config, weights)
        for stages, half in zip((AttentionStages, MoeStages), self._halves, strict=True):
            for name in vars(stages):
                if not name.startswith("__"):
                    setattr(self, name, getattr(half, name))

    def edit(self, tensors: LayerTensors) -> None:
        for half in self._halves:
            half.edit(tensors)

    def fuse(self, tensors: LayerTensors) -> dict[str, torch.Tensor]:
        # Both halves fuse alike, except for mistakes of the experts.
        return self._halves[1].fuse(tensors)


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
        yield Plant(
            name=f"{first} + {second}",
            sites=(*first.sites, *second.sites),
            arithmetic=PairArithmetic,
            kind=Kind.PAIR,
            parameters={"attention": first, "moe": second},
            halves=(first, second),
        )
