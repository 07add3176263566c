"""Layers in vLLM's own style, which pass the residual stream on as two summands, shown as layers that pass it on whole.

Such a layer is called as `layer(positions, hidden_states, residual, …)` and returns (hidden_states, residual). The next
norm adds the two. Hooks put their sum in the first place and zeros in the second, which changes no sum.
H hidden.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from minimax_tools.model.sites import Site
from neuron.ports.exposure import find_exposure

_STATES, _RESIDUAL = "hidden_states", "residual"


def passes_summands(layer: nn.Module) -> bool:
    """Decide whether a layer takes the residual stream as two summands."""
    return _RESIDUAL in inspect.signature(layer.forward).parameters


def show_stream(layer: nn.Module) -> None:
    """Hook a layer: its first argument and its first output become the residual stream, [T,H]."""
    signature = inspect.signature(layer.forward)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = dict(signature.bind(*args, **kwargs).arguments)
        states, residual = _summed(given.pop(_STATES), given.pop(_RESIDUAL, None))
        # The states first: a site's tap counts keyword arguments too.
        return (), {_STATES: states, _RESIDUAL: residual, **given}

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        is_pair = isinstance(output, (tuple, list)) and len(output) == 2
        return _summed(*output) if is_pair else output

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after)


def find_stream_sites(layer: nn.Module) -> dict[str, str]:
    """Return the sites that a hooked layer shows by usual names, as a port declares them.

    The norm behind the attention adds the summands: its second output is the stream there, its first one is normed.
    """
    taps = find_exposure(layer, what=type(layer).__name__).taps
    sites = {str(site): str(tap) for site, tap in taps.items() if tap.path}
    if Site.POST_NORM in taps:
        sites[str(Site.ATTN_RESIDUAL)] = f"{taps[Site.POST_NORM].path}:output[1]"
    return sites


def _summed(states: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    if residual is None:
        return states, None
    return states + residual, torch.zeros_like(residual)
