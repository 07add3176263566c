"""Base of the stages of a layer's arithmetic, and the weights that they compute with.

A stage is a method that a mistake, which is a subclass, may override. `AttentionStages` and `MoeStages` have the
stages of a layer's halves. H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

# Takes a site's name and value, shows the value, and returns it.
Tap = Callable[[str, torch.Tensor], torch.Tensor]


class FusedWeights(nn.Module):
    """The weights of a device port's layer: q, k and v fused, experts grouped."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    o_proj: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    gate: torch.Tensor
    bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        shapes = {
            "input_norm": (hidden,),
            "post_norm": (hidden,),
            "qkv": (query + 2 * key, hidden),
            "o_proj": (hidden, query),
            "q_norm": (query,),
            "k_norm": (key,),
            "gate_up": (experts, 2 * inner, hidden),
            "down": (experts, hidden, inner),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape))
        # The router stays in float32 when the module is cast to BF16.
        self.register_buffer("gate", torch.empty((experts, hidden), dtype=torch.float32))
        self.register_buffer("bias", torch.empty(experts, dtype=torch.float32))


class Stages:
    """Parts that both halves of a layer share: parameters and norms.

    Args:
        config: Quantities of the model, with Hugging Face's names.
        weights: The module that holds the weights.
        parameters: Parameters of the mistake; a stage reads them as attributes of `self.parameters`.
    """

    def __init__(self, config: Any, weights: FusedWeights, **parameters: Any) -> None:
        self.config = config
        self.weights = weights
        self.parameters = SimpleNamespace(**parameters)

    def number(self, name: str) -> float:
        """Read a numeric parameter of the mistake."""
        return float(getattr(self.parameters, name))

    def block_norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute input_norm or post_norm on states [...,H]."""
        return self.normalise(states, weight)

    def normalise(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute RMSNorm over the last dim of states [...,H] with float32 statistics."""
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps())
        return weight * exact.to(states.dtype)

    def eps(self) -> float:
        """Return the number that is added to the mean square."""
        return float(self.config.rms_norm_eps)
