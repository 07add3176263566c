"""Places: every tensor that a module holds, whether loading fills it or not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def find_places(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers, and tensors kept as plain attributes, by name; each tensor once.

    What is kept outside the state dict can still hold weights: a port may keep them there on purpose, and one that
    leaves a buffer there by mistake computes with what its constructor put into it.
    """
    places: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _all_tensors(module):
        if id(tensor) not in seen and tensor.numel() and not tensor.is_meta:
            seen.add(id(tensor))
            places[name] = tensor.detach()
    return places


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, submodule in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in vars(submodule).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}{name}", value
            elif isinstance(value, (list, tuple)):
                for index, entry in enumerate(value):
                    if isinstance(entry, torch.Tensor):
                        yield f"{prefix}{name}[{index}]", entry
            elif isinstance(value, dict) and name not in ("_parameters", "_buffers", "_modules"):
                for key, entry in value.items():
                    if isinstance(entry, torch.Tensor):
                        yield f"{prefix}{name}[{key!r}]", entry
