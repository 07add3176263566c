"""Stages: what all stages of a layer's arithmetic share: quantities, weights, the mistake's parameters, and the norm.

B batch, S rows of this pass, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from faults.weights import Weights

# Shows a site's value, and gives it on.
Tap = Callable[[str, torch.Tensor], torch.Tensor]


class Stages:
    """Some stages of a layer.

    Args:
        config: The model's quantities.
        weights: The module that holds them.
        parameters: Of the mistake, by name: `self.of` has them as attributes.
    """

    def __init__(self, config: Any, weights: Weights, **parameters: Any) -> None:
        self.config = config
        self.weights = weights
        self.of = SimpleNamespace(**parameters)

    def number(self, name: str) -> float:
        """A parameter of the mistake that is a number."""
        return float(getattr(self.of, name))

    def block_norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Either norm over the hidden size."""
        return self.normalise(states, weight)

    def normalise(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm with float32 statistics."""
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps())
        return weight * exact.to(states.dtype)

    def eps(self) -> float:
        """What is added to the mean square."""
        return float(self.config.rms_norm_eps)
