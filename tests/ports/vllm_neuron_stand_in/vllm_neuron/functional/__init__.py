"""Stand-in for vllm_neuron/functional: attention over one prompt, as the plugin's PyTorch reference has it."""

from __future__ import annotations

import torch


def flash_attention(q, k, v, scale, tp_q=True, tp_out=False):
    """Return causal attention [N,D,T] of queries and keys [N,D,T], as `tp_q=False, tp_out=True` lay them out."""
    assert (tp_q, tp_out) == (False, True), "the stand-in knows one layout"
    scores = torch.matmul(q.float().transpose(1, 2), k.float()) * scale
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).to(v.dtype)
    return torch.matmul(weights, v).transpose(1, 2)
