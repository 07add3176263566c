"""MiniMax-M2 decoder layer for a device with fused projections and grouped experts.

Judge it with:

    mm2-test sweep --model DIR --golden DIR --target port.py:DecoderLayer --backend cpu

B batch, S sequence, T tokens, H hidden, N heads, K kv heads, D head_dim, E experts, I inner width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

QUERY_BLOCK = 16  # queries that are attended at a time
EXPERT_BLOCK = 8  # experts that are multiplied at a time


class RMSNorm(nn.Module):
    """RMSNorm over the last dim."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., width]."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class QKNorm(RMSNorm):
    """RMSNorm of all queries, or of all keys."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [B,S,heads·D]."""
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


class Rotary(nn.Module):
    """Rotary embedding of the first rotary_dim dims of each head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.width = config.rotary_dim
        self.base = config.rope_theta

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [B,1,S,rotary_dim] of positions [B,S], float32."""
        exponents = (
            torch.arange(0, self.width, 2, dtype=torch.float32, device=position_ids.device) / self.width
        )
        angles = position_ids[:, None, :, None].float() * self.base**-exponents
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return (-second half, first half) of x [..., rotary_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    """Attention with a fused projection, in blocks of queries."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        widths = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        self.widths = widths
        self.wqkv = nn.Linear(config.hidden_size, sum(widths), bias=False)
        self.wo = nn.Linear(widths[0], config.hidden_size, bias=False)
        self.q_norm = QKNorm(widths[0], config.rms_norm_eps)
        self.k_norm = QKNorm(widths[1], config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.q, self.k, self.v = nn.Identity(), nn.Identity(), nn.Identity()
        self.rotated_q, self.rotated_k = nn.Identity(), nn.Identity()

    def forward(
        self, x: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Map x [B,S,H] to [B,S,H]."""
        q, k, v = self.wqkv(x).split(self.widths, dim=-1)
        q, k, v = (
            self.split_heads(self.q_norm(self.q(q))),
            self.split_heads(self.k_norm(self.k(k))),
            self.v(v),
        )
        cos, sin = self.rotary(position_ids)
        q, k = self.rotated_q(self.apply_rotary(q, cos, sin)), self.rotated_k(self.apply_rotary(k, cos, sin))
        groups = self.heads // self.kv_heads
        k = k.repeat_interleave(groups, dim=1)
        v = self.split_heads(v).repeat_interleave(groups, dim=1)
        context = self.attend(q, k, v, attention_mask)
        return self.wo(context.transpose(1, 2).reshape(*x.shape[:2], -1))

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape [B,S,heads·D] to [B,heads,S,D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def apply_rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [B,heads,S,D]."""
        turned, kept = x[..., : self.rotary.width], x[..., self.rotary.width :]
        turned = turned * cos.to(x.dtype) + rotate_half(turned) * sin.to(x.dtype)
        return torch.cat((turned, kept), dim=-1)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the context [B,N,S,D], block after block of queries."""
        key_places = torch.arange(k.shape[2], device=k.device)
        is_real = attention_mask[:, None, None, :].bool()
        blocks = []
        for start in range(0, q.shape[2], QUERY_BLOCK):
            block = q[:, :, start : start + QUERY_BLOCK]
            places = start + torch.arange(block.shape[2], device=q.device)
            visible = (key_places <= places[:, None]) & is_real
            scores = (block.float() @ k.float().transpose(-1, -2)) * self.head_dim**-0.5
            scores = scores.masked_fill(~visible, torch.finfo(torch.float32).min)
            blocks.append(scores.softmax(-1).to(v.dtype) @ v)
        return torch.cat(blocks, dim=2)


class Router(nn.Module):
    """Choice of experts, in float32."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(
            torch.empty(config.num_local_experts, config.hidden_size, dtype=torch.float32)
        )
        self.bias = nn.Parameter(torch.empty(config.num_local_experts, dtype=torch.float32))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits [T,E], and weights and numbers [T,k] of the chosen experts."""
        logits = tokens.float() @ self.weight.T
        scores = logits.sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """Experts, every one on every token, block after block, each token weighted by its affinity to each expert."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.router = Router(config)
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [B,S,H] to [B,S,H]."""
        tokens = x.flatten(0, 1)
        logits, weights, chosen = self.router(tokens)
        affinities = torch.zeros_like(logits).scatter(-1, chosen, weights)
        total = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        for start in range(0, self.down.shape[0], EXPERT_BLOCK):
            block = slice(start, start + EXPERT_BLOCK)
            gate, up = (tokens @ self.gate_up[block]).chunk(2, dim=-1)
            output = (functional.silu(gate) * up) @ self.down[block]
            total = total + (output.float() * affinities[:, block].T.unsqueeze(-1)).sum(0)
        return total.to(x.dtype).view(x.shape)


class DecoderLayer(nn.Module):
    """The port: one module that serves every layer in turn."""

    reuse = True
    sites = {  # noqa: RUF012
        "input_norm": "input_norm",
        "q_proj": "attention.q",
        "k_proj": "attention.k",
        "v_proj": "attention.v",
        "q_norm": "attention.q_norm",
        "k_norm": "attention.k_norm",
        "q_rope": "attention.rotated_q",
        "k_rope": "attention.rotated_k",
        "attn_context": "attention.wo:input",
        "attn_delta": "attention.wo",
        "attn_residual": "post_norm:input",
        "post_norm": "post_norm",
        "router_logits": "experts.router:output[0]",
        "router_weights": "experts.router:output[1]",
        "router_experts": "experts.router:output[2]",
        "moe_delta": "experts",
    }

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.experts = Experts(config)

    def convert_state_dict(
        self, tensors: dict[str, torch.Tensor], config: Any, layer_idx: int
    ) -> dict[str, torch.Tensor]:
        """Return the module's tensors from the hub's: fused rows, and experts transposed for x @ W."""
        moe = "block_sparse_moe."
        numbers = range(config.num_local_experts)
        w1 = [tensors[f"{moe}experts.{number}.w1.weight"] for number in numbers]
        w2 = [tensors[f"{moe}experts.{number}.w2.weight"] for number in numbers]
        w3 = [tensors[f"{moe}experts.{number}.w3.weight"] for number in numbers]
        return {
            "input_norm.weight": tensors["input_layernorm.weight"],
            "post_norm.weight": tensors["post_attention_layernorm.weight"],
            "attention.wqkv.weight": torch.cat([tensors[f"self_attn.{name}_proj.weight"] for name in "qkv"]),
            "attention.wo.weight": tensors["self_attn.o_proj.weight"],
            "attention.q_norm.weight": tensors["self_attn.q_norm.weight"],
            "attention.k_norm.weight": tensors["self_attn.k_norm.weight"],
            "experts.router.weight": tensors[f"{moe}gate.weight"],
            "experts.router.bias": tensors[f"{moe}e_score_correction_bias"],
            "experts.gate_up": torch.stack([torch.cat(pair).T for pair in zip(w1, w3, strict=True)]),
            "experts.down": torch.stack([matrix.T for matrix in w2]),
        }

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Map hidden states [B,S,H], a mask [B,S] of 0 and 1 and positions [B,S] to [B,S,H]."""
        hidden_states = hidden_states + self.attention(
            self.input_norm(hidden_states), attention_mask, position_ids
        )
        return hidden_states + self.experts(self.post_norm(hidden_states))
