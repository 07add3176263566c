"""Stand-in for vllm_neuron/nn: the linear layer whose output is divided among ranks."""

from __future__ import annotations

import torch
from torch import nn


class ColumnParallelLinear(nn.Module):
    """A linear layer; on one rank it is whole."""

    def __init__(self, in_features, out_features, bias, dtype, gather_output, tp_group):
        super().__init__()
        assert not bias, "the stand-in has none"
        self.out_features_per_rank, self.tp_size, self.gather_output = out_features, 1, gather_output
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))

    def forward(self, states):
        return nn.functional.linear(states, self.weight)
