"""The example port with mistakes in sums, with a site that it does not compute with, and without a conversion."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
import minimal_port
import planted


class ResidualLost(planted.Planted):
    """The second residual add is missing."""

    def forward(self, hidden_states, attention_mask, position_ids):
        delta = self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        return self.moe(self.post_attention_layernorm(hidden_states + delta))


class InputLost(planted.Planted):
    """The first residual add is missing."""

    def forward(self, hidden_states, attention_mask, position_ids):
        hidden_states = self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        return hidden_states + self.moe(self.post_attention_layernorm(hidden_states))


class CopyShown(planted.GeluExperts):
    """GELU instead of SiLU, and a site that shows a copy of what the experts add."""

    sites = {**planted.Planted.sites, "moe_delta": "shown"}

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.shown = nn.Identity()

    def forward(self, hidden_states, attention_mask, position_ids):
        delta = self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        hidden_states = hidden_states + delta
        experts = self.moe(self.post_attention_layernorm(hidden_states))
        self.shown(experts)
        return hidden_states + experts


class _SwappedExpert(minimal_port.Expert):
    def forward(self, states):
        return self.w2(functional.silu(self.w3(states)) * self.w1(states))


class Unconverted(minimal_port.DecoderLayer):
    """Gate and up swapped, under the hub's own names."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        for expert in self.block_sparse_moe.experts:
            expert.__class__ = _SwappedExpert
