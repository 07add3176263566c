"""Stand-ins: modules that take the place of what belongs to another part of a split model, and do nothing.

Shapes: B batch, S sequence, H hidden
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class PassThrough(nn.Module):
    """Stands where a layer belongs to another part: gives back the hidden states it is given.

    Args:
        layer: The layer that it stands for.
        in_tuple: Whether the model's loop expects them as the first of a tuple.
    """

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple
        # A model's own loop may ask a layer for its kind.
        for name, value in vars(layer).items():
            if isinstance(value, (str, int)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """[B,S,H] to the same."""
        return (hidden_states, None) if self._in_tuple else hidden_states


class AddsNothing(nn.Module):
    """Stands where position embeddings belong to another part."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """A number that leaves every other as it is when it is added; +0.0 would make 0.0 of -0.0."""
        return torch.tensor(-0.0)


class Elsewhere(nn.Module):
    """Stands where a module belongs to another part and nobody calls it."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Refuse.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("this module belongs to another part of the split model")
