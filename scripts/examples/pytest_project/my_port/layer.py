"""The decoder layer. B batch, S sequence, H hidden."""

from __future__ import annotations

import torch
from torch import nn

from my_port.attention import Attention, RmsNorm
from my_port.experts import Experts


class DecoderLayer(nn.Module):
    """The port; called as DecoderLayer(config, layer_idx)."""

    # Submodule whose output is the site; `:input` takes its input.
    sites = {
        "input_norm": "input_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "attn_context": "self_attn.o_proj:input",
        "attn_delta": "self_attn",
        "attn_residual": "post_attention_layernorm:input",
        "post_norm": "post_attention_layernorm",
        "router_logits": "experts.gate",
        "moe_delta": "experts",
    }

    def __init__(self, config, layer_idx):
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.experts = Experts(config)

    def forward(self, hidden_states, attention_mask, position_ids):
        """Return the output [B,S,H] for hidden states [B,S,H], a mask [B,S] of 0 and 1, and positions [B,S]."""
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, attention_mask, position_ids)
        return hidden_states + self.experts(self.post_attention_layernorm(hidden_states))

    def convert_state_dict(self, tensors, config, layer_idx):
        """Return this layer's state dict for the checkpoint's tensors: q, k, v fused, and gate and up."""
        moe = "block_sparse_moe"
        numbers = range(config.num_experts)
        kept = ("self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj")
        kept = (*kept, "input_layernorm", "post_attention_layernorm")
        return {
            **{f"{name}.weight": tensors[f"{name}.weight"] for name in kept},
            "self_attn.qkv_proj.weight": torch.cat(
                [tensors[f"self_attn.{name}_proj.weight"] for name in "qkv"]
            ),
            "experts.gate.weight": tensors[f"{moe}.gate.weight"],
            "experts.bias": tensors[f"{moe}.e_score_correction_bias"],
            "experts.gate_up": torch.stack(
                [
                    torch.cat(
                        (
                            tensors[f"{moe}.experts.{number}.w1.weight"],
                            tensors[f"{moe}.experts.{number}.w3.weight"],
                        )
                    )
                    for number in numbers
                ]
            ),
            "experts.down": torch.stack([tensors[f"{moe}.experts.{number}.w2.weight"] for number in numbers]),
        }
