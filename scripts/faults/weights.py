"""Weights: the parameters of a device port's layer, q, k and v fused, experts grouped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Weights(nn.Module):
    """The parameters of a layer, fused and grouped."""

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
        query, key = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
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
        self.register_buffer("gate", torch.empty((experts, hidden), dtype=torch.float32))
        self.register_buffer("bias", torch.empty(experts, dtype=torch.float32))
