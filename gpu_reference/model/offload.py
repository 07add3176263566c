"""Weights that accelerate keeps off their device until a module runs; until then they are on the meta device."""

from __future__ import annotations

from typing import Any

import torch


def weight_of(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the weight that a module computes with, in the dtype that it computes in; fetch it if it is offloaded.

    It lies on its own device or, fetched, where accelerate keeps it, and may share memory with the model.
    """
    weight: torch.Tensor = getattr(module, name)
    if not weight.is_meta:
        return weight.detach()
    # accelerate casts a fetched weight to the dtype of its placeholder.
    fetched: torch.Tensor = _hook(module).weights_map[name]
    return fetched.to(weight.dtype)


def hold_weight(module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace the only weight of a module, on the device where the module runs. It is not offloaded any more."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    device = getattr(module, name).device
    is_offloaded = device.type == "meta"
    if is_offloaded:
        device = torch.device(_hook(module).execution_device)
        remove_hook_from_module(module)
    setattr(module, name, torch.nn.Parameter(value.to(device), requires_grad=False))
    if is_offloaded:
        # The module's inputs must still be moved to the device where it runs.
        add_hook_to_module(module, AlignDevicesHook(execution_device=device))


def _hook(module: torch.nn.Module) -> Any:
    hook = getattr(module, "_hf_hook", None)
    assert hook is not None, "accelerate leaves no weight on meta without a hook that fetches it"
    return hook
