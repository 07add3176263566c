"""Attention with one matrix for q, k and v. B batch, S sequence, H hidden, N heads, K kv heads, D head_dim."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class RmsNorm(nn.Module):
    """RMSNorm over the last dim, computed in float32."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, states):
        """Normalise states [..., width]."""
        return (
            functional.rms_norm(states.float(), (states.shape[-1],), eps=self.eps).to(states.dtype)
            * self.weight
        )


class Attention(nn.Module):
    """Causal attention, padding hidden; q and k are normalised over all heads, and rotated in part."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.widths = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.widths), bias=False)
        self.q_norm = RmsNorm(self.widths[0], config.rms_norm_eps)
        self.k_norm = RmsNorm(self.widths[1], config.rms_norm_eps)
        self.o_proj = nn.Linear(self.widths[0], config.hidden_size, bias=False)

    def forward(self, states, attention_mask, position_ids):
        """Map [B,S,H] to [B,S,H]."""
        q, k, v = self.qkv_proj(states).split(self.widths, dim=-1)
        q = self.rotate(self.heads(self.q_norm(q)), position_ids)
        k = self.rotate(self.heads(self.k_norm(k)), position_ids)
        visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        # A padded row sees itself: a row that sees nothing would become NaN.
        own = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
        visible = (visible & attention_mask[:, None, None, :].bool()) | own
        context = functional.scaled_dot_product_attention(
            q, k, self.heads(v), attn_mask=visible, enable_gqa=True
        )
        return self.o_proj(context.transpose(1, 2).flatten(2))

    def heads(self, flat):
        """Reshape [B,S,heads·D] to [B,heads,S,D]."""
        return flat.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def rotate(self, heads, position_ids):
        """Rotate the first rotary_dim dims in pairs: dim i with dim i + rotary_dim / 2."""
        width = self.config.rotary_dim
        steps = torch.arange(0, width, 2, dtype=torch.float32, device=heads.device) / width
        angles = position_ids[:, None, :, None].float() / self.config.rope_theta**steps
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second, rest = heads.split((width // 2, width // 2, heads.shape[-1] - width), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
