"""transformers' own decoder layer as a target, in each of its implementations.

These ports are right by definition. They round in other places than the golden, so their difference is noise.
scripts/calibrate.py fits the limits of the verdict to it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import MiniMaxM2Config
from transformers.masking_utils import create_causal_mask
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2DecoderLayer, MiniMaxM2RotaryEmbedding


def make_config(config, *, attention, experts):
    """Return transformers' configuration of a model, with these implementations."""
    known = {name: value for name, value in vars(config).items() if name in MiniMaxM2Config.__annotations__}
    own = MiniMaxM2Config(**known, rotary_dim=config.rotary_dim, rope_theta=config.rope_theta)
    own._attn_implementation, own._experts_implementation = attention, experts
    return own


def keep_in_float32(moe):
    """Let the router's gate and bias be float32."""
    moe.gate.weight = nn.Parameter(moe.gate.weight.float())
    moe.e_score_correction_bias = nn.Buffer(moe.e_score_correction_bias.float())


def by_own_names(tensors, config, prefix):
    """Return a layer's tensors by transformers' names: `mlp` for `block_sparse_moe`, the experts stacked."""
    state = {
        prefix + name.replace("block_sparse_moe.", "mlp."): tensors[name]
        for name in tensors
        if ".experts." not in name
    }
    experts = [f"block_sparse_moe.experts.{expert}." for expert in range(config.num_local_experts)]
    state[prefix + "mlp.experts.gate_up_proj"] = torch.stack(
        [torch.cat((tensors[name + "w1.weight"], tensors[name + "w3.weight"])) for name in experts]
    )
    state[prefix + "mlp.experts.down_proj"] = torch.stack([tensors[name + "w2.weight"] for name in experts])
    return state


class _Layer(nn.Module):
    """transformers' layer with its mask and its rotary embedding; router gate and bias stay in float32."""

    attn_implementation = "sdpa"
    experts_implementation = "grouped_mm"
    reuse = True  # mm2 builds one module and gives it the weights of each layer in turn
    sites = {
        "input_norm": "layer.input_layernorm",
        "q_proj": "layer.self_attn.q_proj",
        "k_proj": "layer.self_attn.k_proj",
        "v_proj": "layer.self_attn.v_proj",
        "q_norm": "layer.self_attn.q_norm",
        "k_norm": "layer.self_attn.k_norm",
        "attn_context": "layer.self_attn.o_proj:input",
        "attn_delta": "layer.self_attn.o_proj",
        "attn_residual": "layer.post_attention_layernorm:input",
        "post_norm": "layer.post_attention_layernorm",
        "router_logits": "layer.mlp.gate:output[0]",
        "router_weights": "layer.mlp.gate:output[1]",
        "router_experts": "layer.mlp.gate:output[2]",
        "moe_delta": "layer.mlp",
    }

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = make_config(
            config, attention=self.attn_implementation, experts=self.experts_implementation
        )
        self.layer = MiniMaxM2DecoderLayer(self.config, layer_idx)
        keep_in_float32(self.layer.mlp)
        self.rotary = MiniMaxM2RotaryEmbedding(self.config)

    def convert_state_dict(self, tensors, config, layer_idx):
        """Return the tensors by transformers' names."""
        return by_own_names(tensors, config, "layer.")

    def forward(self, hidden_states, attention_mask, position_ids):
        """Map [B,S,H] to [B,S,H]."""
        # The fourth is the cache: named `past_key_values` up to transformers 5.23, and `cache` since.
        mask = create_causal_mask(self.config, hidden_states, attention_mask, None, position_ids=position_ids)
        rotation = self.rotary(hidden_states, position_ids=position_ids)
        return self.layer(
            hidden_states, attention_mask=mask, position_ids=position_ids, position_embeddings=rotation
        )


class EagerAttention(_Layer):
    """Eager attention: scores are rounded to BF16 before the softmax."""

    attn_implementation = "eager"


class FlexAttention(_Layer):
    """Attention compiled by torch, block by block."""

    attn_implementation = "flex_attention"


class EagerExperts(_Layer):
    """Eager experts: their outputs are added up in BF16."""

    experts_implementation = "eager"


class Eager(_Layer):
    """Eager attention and eager experts."""

    attn_implementation = "eager"
    experts_implementation = "eager"


class BatchedExperts(_Layer):
    """Weights gathered per token and expert."""

    experts_implementation = "batched_mm"


class Same(_Layer):
    """The implementations that a golden has by default."""


class LaterPositions(_Layer):
    """Positions counted from 5: attention sees only their differences, but rounds other numbers."""

    def forward(self, hidden_states, attention_mask, position_ids):
        """Map [B,S,H] to [B,S,H]."""
        return super().forward(hidden_states, attention_mask, position_ids + 5)


class RoundedWeights(_Layer):
    """Routing weights rounded to BF16, as the hub's own code for MiniMax-M2 does; sdpa and grouped experts."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer.mlp.gate.register_forward_hook(_round_weights)


def _round_weights(gate, arguments, outputs):
    """Replace the outputs of the router's gate."""
    logits, weights, experts = outputs
    return logits, weights.bfloat16().float(), experts


class Float32NormWeights(_Layer):
    """The norms' weights multiplied in float32 and rounded after it, as kernels that fuse the two do."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        layer = self.layer
        for norm in (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.self_attn.q_norm,
            layer.self_attn.k_norm,
        ):
            norm.register_forward_hook(_weigh_in_float32)


def _weigh_in_float32(norm, arguments, _):
    """Replace a norm's output: compute it again from its only argument."""
    exact = arguments[0].float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return (norm.weight.float() * exact).to(arguments[0].dtype)
