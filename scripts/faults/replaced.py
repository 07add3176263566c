"""Plants of one line: the right arithmetic with some stages, a site's value or weights replaced by functions.

H hidden, E experts, I their width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from faults.arithmetic import Arithmetic, FusedWeights, KeyValues, Tap
from faults.plant import Kind, Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site


class StageReplaced(Arithmetic):
    """The right arithmetic with stages replaced: a function gets the right stage, the arithmetic, and its arguments."""

    def __init__(self, config: Any, weights: FusedWeights, **stages: Callable[..., Any]) -> None:
        super().__init__(config, weights)
        for name, stage in stages.items():
            setattr(self, name, partial(stage, getattr(self, name), self))


class SiteReplaced(Arithmetic):
    """The right arithmetic that goes on with `change(value)` at a site."""

    def run(
        self,
        states: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        past: KeyValues | None,
        tap: Tap,
    ) -> tuple[torch.Tensor, KeyValues]:
        def changing(site: str, value: torch.Tensor) -> torch.Tensor:
            is_hit = site == self.parameters.site
            return tap(site, self.parameters.change(value).to(value.dtype) if is_hit else value)

        return super().run(states, mask, positions, past, changing)


def replace_stages(name: str, sites: tuple[Site, ...], *akin: str, **stages: Callable[..., Any]) -> Plant:
    """Build a plant from the stages that it gets wrong; `akin` are names of the catalogue that are true of it."""
    return Plant(name, sites, StageReplaced, stages, kind=Kind.UNCATALOGUED, akin=akin)


def replace_site(name: str, site: Site, change: Callable[[torch.Tensor], torch.Tensor], *akin: str) -> Plant:
    """Build a plant that changes the value of a site."""
    return Plant(
        name, (site,), SiteReplaced, {"site": str(site), "change": change}, kind=Kind.UNCATALOGUED, akin=akin
    )


def replace_weights(
    name: str, sites: tuple[Site, ...], change: Callable[[LayerTensors, Any], None], *akin: str
) -> Plant:
    """Build a plant that changes the hub's tensors before they are fused."""
    return replace_stages(name, sites, *akin, edit=lambda _, layer, tensors: change(tensors, layer.config))


def replace_fused(name: str, change: Callable[[dict[str, torch.Tensor]], Any], *akin: str) -> Plant:
    """Build a plant that changes the experts' fused weights."""

    def fuse(right: Callable[[LayerTensors], dict[str, torch.Tensor]], _: Any, tensors: LayerTensors) -> Any:
        state = right(tensors)
        change(state)
        return state

    return replace_stages(name, (Site.MOE_DELTA,), *akin, fuse=fuse)


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Build the change that multiplies a value by a factor."""
    return lambda value: factor * value


def on_half(
    change: Callable[[torch.Tensor], torch.Tensor], dim: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Change the second half of a dim alone."""

    def changed(value: torch.Tensor) -> torch.Tensor:
        first, second = value.chunk(2, dim)
        return torch.cat((first, change(second).to(value.dtype)), dim)

    return changed
