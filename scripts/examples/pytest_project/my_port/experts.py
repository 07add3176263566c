"""Router and experts. T tokens, H hidden, E experts, k experts per token, F width of an expert."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Experts(nn.Module):
    """The experts that the router chooses for each token."""

    def __init__(self, config):
        super().__init__()
        self.num_chosen = config.num_experts_per_tok
        num_experts, hidden, width = config.num_experts, config.hidden_size, config.intermediate_size
        # Float32: the bias is near 9, where steps of BF16 are 0.06.
        self.gate = nn.Linear(hidden, num_experts, bias=False, dtype=torch.float32)
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))

    def forward(self, states):
        """Map [B,S,H] to [B,S,H]."""
        tokens = states.flatten(0, 1)
        chosen, weights = self.choose(tokens)
        total = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (tokens[token] @ self.gate_up[expert].T).chunk(2, dim=-1)
            output = (functional.silu(gate) * up) @ self.down[expert].T
            total.index_add_(0, token, output.float() * weights[token, place, None])
        return total.to(states.dtype).view(states.shape)

    def choose(self, tokens):
        """Return the experts [T,k] of each token, and their weights [T,k]; only the choice sees the bias."""
        scores = self.gate(tokens.float()).sigmoid()
        chosen = (scores + self.bias).topk(self.num_chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True)
