"""Offloading: weights that accelerate keeps off their device until a module runs, read and replaced."""

from __future__ import annotations

from typing import Any

import torch


def weight_of(module: torch.nn.Module, name: str) -> torch.Tensor:
    """The weight that `module` computes with; one that is offloaded is fetched, in the dtype it runs in."""
    weight: torch.Tensor = getattr(module, name)
    if not weight.is_meta:
        return weight.detach()
    # accelerate casts what it fetches to the dtype of the placeholder that it fetches it for.
    fetched: torch.Tensor = _hook(module).weights_map[name]
    return fetched.to(weight.dtype)


def hold_weight(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Give `module` another weight, on the device where it runs; from now on it is not offloaded.

    Args:
        module: A module whose only parameter is that weight.
        name: The weight's name in it.
        value: The new weight; its dtype is kept.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    device = getattr(module, name).device
    is_offloaded = device.type == "meta"
    if is_offloaded:
        device = torch.device(_hook(module).execution_device)
        remove_hook_from_module(module)
    setattr(module, name, torch.nn.Parameter(value.to(device), requires_grad=False))
    if is_offloaded:
        # Its inputs are still to be moved to where it runs.
        add_hook_to_module(module, AlignDevicesHook(execution_device=device))


def _hook(module: torch.nn.Module) -> Any:
    hook = getattr(module, "_hf_hook", None)
    assert hook is not None, "accelerate leaves no weight on meta without a hook that fetches it"
    return hook
