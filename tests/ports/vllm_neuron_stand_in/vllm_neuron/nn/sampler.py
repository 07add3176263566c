"""Stand-in for vllm_neuron/nn/sampler.py: the likeliest token."""

from __future__ import annotations

from torch import nn


class Sampler(nn.Module):
    """Sampling on the device."""

    def __init__(self, config, process_group):
        super().__init__()

    def forward(self, logits, sampling_params, logit_mask=None, tp_rank=None):
        return logits.argmax(-1).int()
