"""A port of MiniMax-M2 on neuronx-distributed-inference's own modules, for the test of its adapter."""

from __future__ import annotations

import torch
from neuronx_distributed.modules.moe.routing import RouterTopK
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import (
    RotaryEmbedding,
    apply_rotary_pos_emb,
    move_heads_front,
)
from neuronx_distributed_inference.modules.moe_v2 import initialize_moe_module
from torch import nn


class Config(InferenceConfig):
    """The device's config is one of a mixture of experts."""

    @classmethod
    def get_neuron_config_cls(cls):
        return MoENeuronConfig


class Norm(nn.Module):
    """RMSNorm over the whole last dim."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, states, **_):
        exact = states.float()
        return self.weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            states.dtype
        )


class Attention(NeuronAttentionBase):
    """NxDI's, with norms over the whole width and a partial rotary embedding; for one rank."""

    def __init__(self, config):
        rotary = RotaryEmbedding(
            config.rotary_dim, max_position_embeddings=config.max_position_embeddings, base=config.rope_theta
        )
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_emb=rotary,
            rms_norm_eps=config.rms_norm_eps,
        )
        self.rotary_dim = config.rotary_dim
        self.q_norm = Norm(self.num_heads * self.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(self.num_key_value_heads * self.head_dim, config.rms_norm_eps)

    def prep_qkv_tensors(self, position_ids, hidden_states, past_key_value, rmsnorm=None, **_):
        q, k, v, residual = self.get_qkv_proj()(hidden_states=hidden_states, rmsnorm=rmsnorm)
        batch, rows, _ = hidden_states.shape
        widths = {"q": self.num_heads, "kv": self.num_key_value_heads}
        q = move_heads_front(self.q_norm(q), batch, rows, widths["q"], self.head_dim)
        k = move_heads_front(self.k_norm(k), batch, rows, widths["kv"], self.head_dim)
        v = move_heads_front(v, batch, rows, widths["kv"], self.head_dim)
        cos, sin = self.rotary_emb(v, position_ids)
        turned = apply_rotary_pos_emb(q[..., : self.rotary_dim], k[..., : self.rotary_dim], cos, sin)
        q, k = (
            torch.cat((part, whole[..., self.rotary_dim :]), dim=-1)
            for part, whole in zip(turned, (q, k), strict=True)
        )
        return q, k, v, cos, sin, residual


class Router(RouterTopK):
    """Chosen by biased scores."""

    def forward(self, hidden_states):
        logits = self.get_router_logits(hidden_states)
        scores = logits.sigmoid()
        experts = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        return logits, scores.to(hidden_states.dtype), experts


class DecoderLayer(nn.Module):
    """The port."""

    def __init__(self, config: Config, layer_idx):
        super().__init__()
        self.self_attn = Attention(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = initialize_moe_module(config=config)
        router = self.block_sparse_moe.router
        router.__class__ = Router
        router.register_buffer("e_score_correction_bias", torch.zeros(config.num_local_experts))
        router.e_score_correction_bias = router.e_score_correction_bias.float()

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None, **kwargs):
        delta, key_value, cos, sin = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            **kwargs,
        )
        hidden_states = hidden_states + delta
        moe = self.block_sparse_moe(self.post_attention_layernorm(hidden_states))[0]
        return hidden_states + moe, key_value, cos, sin, None


class WithoutBias(DecoderLayer):
    """A layer without a place for the correction bias."""

    def __init__(self, config: Config, layer_idx):
        super().__init__(config, layer_idx)
        self.block_sparse_moe.router.__class__ = RouterTopK
        del self.block_sparse_moe.router.e_score_correction_bias


class FusedProjection(DecoderLayer):
    """A layer with q, k and v in a single matrix, as NxDI's config says. It serves all layers."""

    mm2_neuron_config = {"fused_qkv": True}
    reuse = True
