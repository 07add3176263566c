"""Stand-ins for the modules of a model that belong to other parts of a split model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PassThrough(nn.Module):
    """Stand-in for a layer of another part: returns its hidden states unchanged.

    Args:
        layer: The layer that is replaced.
        in_tuple: Whether the model's loop over layers expects each to return a tuple.
    """

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple
        # The model's loop over layers may read plain attributes, such as `attention_type`.
        for name, value in vars(layer).items():
            if isinstance(value, (str, int)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Return `hidden_states` [B,S,H]."""
        return (hidden_states, None) if self._in_tuple else hidden_states


class AddsNothing(nn.Module):
    """Stand-in for an embedding of another part that is added to the hidden states, such as that of positions."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return -0.0: adding it changes no number, while adding +0.0 turns -0.0 into +0.0."""
        return torch.tensor(-0.0)


class Elsewhere(nn.Module):
    """Stand-in for a module of another part that is never called."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Raise RuntimeError."""
        raise RuntimeError("this module belongs to another part of the split model")
