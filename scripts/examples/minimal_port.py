"""The smallest port: one class, with the checkpoint's own names.

Weights are loaded by the hub's names as they are (`self_attn.q_proj.weight`,
`block_sparse_moe.experts.3.w1.weight`), and mm2 finds the sites by the usual names. Judge it with:

    mm2-test sweep --model DIR --golden DIR --target scripts/examples/minimal_port.py:DecoderLayer

`port.py` beside it shows what a port for a device wants: fused weights, every site, one compile.

B batch, S sequence, T tokens, H hidden, N heads, K kv heads, D head_dim, E experts.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Norm(nn.Module):
    """RMSNorm over the whole last dim, its sum in float32."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, states):
        """Normalise states [..., width]."""
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(states.dtype)


class Attention(nn.Module):
    """Attention with norms over all heads of q and of k, and rotation of each head's first rotary_dim dims."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm = Norm(query_width, config.rms_norm_eps)
        self.k_norm = Norm(key_width, config.rms_norm_eps)

    def forward(self, states, attention_mask, position_ids):
        """Map [B,S,H] to [B,S,H]."""
        q = self.rotate(self.heads(self.q_norm(self.q_proj(states))), position_ids)
        k = self.rotate(self.heads(self.k_norm(self.k_proj(states))), position_ids)
        v = self.heads(self.v_proj(states))
        num_queries = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(num_queries, dim=1), v.repeat_interleave(num_queries, dim=1)
        visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        visible = visible & attention_mask[:, None, None, :].bool()
        scores = (q.float() @ k.float().transpose(-1, -2)) * self.config.head_dim**-0.5
        # A finite minimum: a padded row that sees nothing must not become NaN.
        scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
        context = scores.softmax(-1).to(v.dtype) @ v
        return self.o_proj(context.transpose(1, 2).flatten(2))

    def heads(self, flat):
        """Reshape [B,S,heads·D] to [B,heads,S,D]."""
        return flat.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def rotate(self, heads, position_ids):
        """Rotate dims in pairs: dim i with dim i + rotary_dim / 2."""
        width = self.config.rotary_dim
        dims = torch.arange(0, width, 2, dtype=torch.float32, device=heads.device)
        angles = position_ids[:, None, :, None].float() / self.config.rope_theta ** (dims / width)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads[..., :width].chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, heads[..., width:]), dim=-1)


class Expert(nn.Module):
    """An expert, SwiGLU: w1 is the gate, w3 the up projection, w2 the down projection."""

    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, states):
        """Map [T,H] to [T,H]."""
        return self.w2(functional.silu(self.w1(states)) * self.w3(states))


class Moe(nn.Module):
    """Router and experts: each expert computes each token, with weight 0 if the token did not choose it."""

    def __init__(self, config):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        # In float32, whatever dtype the rest has: the bias is near 9, where BF16 steps are 0.06.
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False, dtype=torch.float32)
        bias = torch.empty(config.num_local_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_local_experts))

    def forward(self, states):
        """Map [B,S,H] to [B,S,H]."""
        tokens = states.flatten(0, 1)
        scores = self.gate(tokens.float()).sigmoid()
        # Only the choice sees the bias, not the weights.
        chosen = (scores + self.e_score_correction_bias).topk(self.num_experts_per_tok, dim=-1).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        for number, expert in enumerate(self.experts):
            total = total + expert(tokens).float() * weights[:, number, None]
        return total.to(states.dtype).view(states.shape)


class DecoderLayer(nn.Module):
    """The port; called as DecoderLayer(config, layer_idx)."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = Moe(config)

    def forward(self, hidden_states, attention_mask, position_ids):
        """Return the output [B,S,H] for hidden states [B,S,H], a mask [B,S] of 0 and 1, and positions [B,S]."""
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, attention_mask, position_ids)
        return hidden_states + self.block_sparse_moe(self.post_attention_layernorm(hidden_states))
