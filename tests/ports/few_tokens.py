"""The example port with mistakes in a few tokens; every class is a target of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))
import port


class AttentionSeesNext(port.Attention):
    """The token before each eighth sees that one, which comes later."""

    def attend(self, q, k, v, attention_mask):
        scores = (
            torch.matmul(q.float(), self.repeat(k).float().transpose(-1, -2)) * self.config.head_dim**-0.5
        )
        places = torch.arange(q.shape[2], device=q.device)
        visible = places <= places[:, None] + (places % 8 == 0).long()
        visible = visible & attention_mask[:, None, None, :].bool()
        scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
        context = torch.matmul(scores.softmax(-1).to(v.dtype), self.repeat(v))
        return context.transpose(1, 2).flatten(2)


class SeesNext(port.DecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = AttentionSeesNext(config)


class UpByExpert(port.DecoderLayer):
    """Up projections that are off by a factor for each expert."""

    def convert_state_dict(self, tensors, config, layer_idx):
        tensors = dict(tensors)
        for expert in range(config.num_local_experts):
            name = f"block_sparse_moe.experts.{expert}.w3.weight"
            tensors[name] = (tensors[name].float() * (0.8 + 0.4 * (expert % 5) / 4)).to(tensors[name].dtype)
        return super().convert_state_dict(tensors, config, layer_idx)
