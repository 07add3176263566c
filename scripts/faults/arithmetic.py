"""Arithmetic of a device port of MiniMax-M2's layer, in stages; a planted mistake overrides one of them.

It is plain PyTorch with the numerics of a device port: q, k and v are fused, experts are grouped.
B prompts, S tokens of this pass (its rows), P tokens of the past, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import torch

from faults.attention_stages import AttentionStages
from faults.moe_stages import MoeStages
from faults.stages import Tap
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.weight_names import expert_weight

KeyValues = tuple[torch.Tensor, torch.Tensor]


class Arithmetic(AttentionStages, MoeStages):
    """The right arithmetic. A mistake is a subclass that overrides some of its methods."""

    def edit(self, tensors: LayerTensors) -> None:
        """Change the layer's tensors, named as on the hub, before they are fused; the right port changes none."""

    def fuse(self, tensors: LayerTensors) -> dict[str, torch.Tensor]:
        """Build the state dict of the weights from the hub's tensors."""
        experts = range(self.config.num_local_experts)
        gate = torch.stack([tensors[expert_weight(expert, "w1")] for expert in experts])
        up = torch.stack([tensors[expert_weight(expert, "w3")] for expert in experts])
        names = ("q_proj", "k_proj", "v_proj")
        return {
            "input_norm": tensors["input_layernorm.weight"],
            "post_norm": tensors["post_attention_layernorm.weight"],
            "qkv": torch.cat([tensors[f"self_attn.{name}.weight"] for name in names]),
            "o_proj": tensors["self_attn.o_proj.weight"],
            "q_norm": tensors["self_attn.q_norm.weight"],
            "k_norm": tensors["self_attn.k_norm.weight"],
            "gate": tensors["block_sparse_moe.gate.weight"],
            "bias": tensors["block_sparse_moe.e_score_correction_bias"],
            "gate_up": torch.cat((gate, up), dim=1),
            "down": torch.stack([tensors[expert_weight(expert, "w2")] for expert in experts]),
        }

    def run(
        self,
        states: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        past: KeyValues | None,
        tap: Tap,
    ) -> tuple[torch.Tensor, KeyValues]:
        """Compute the output [B,S,H], and keys and values [B,K,P+S,D].

        Args:
            states: [B,S,H].
            mask: 0 at padding, else 1, [B,P+S].
            positions: [B,S].
            past: Keys and values [B,K,P,D]; None in a prefill.
            tap: Called with the name and value of each site, which it shows; returns the value.
        """
        normed = tap("input_norm", self.input_norm(states))
        q, k, v = self.project(normed)
        q, k, v = tap("q_proj", q), tap("k_proj", k), tap("v_proj", v)
        q, k = self.norm_and_rotate(q, k, positions, tap)
        values = self.heads(v)
        if past is not None:
            k, values = torch.cat((past[0], k), dim=2), torch.cat((past[1], values), dim=2)
        context = tap("attn_context", self.attend(q, k, values, mask))
        delta = tap("attn_delta", self.project_out(context))
        residual = tap("attn_residual", self.add_attention(states, delta, normed))
        post = tap("post_norm", self.post_norm(residual, states))
        tokens = post.flatten(0, 1)
        logits = tap("router_logits", self.logits(tokens))
        experts = tap("router_experts", self.choose(self.scores(logits)))
        affinities = tap("router_weights", self.weigh(logits, experts))
        real = mask[:, -states.shape[1] :].flatten().bool()
        moe = self.mix_experts(tokens, experts, affinities, real).unflatten(0, states.shape[:2])
        moe = tap("moe_delta", self.finish_moe(moe, mask[:, -states.shape[1] :]))
        return self.add_moe(residual, moe, states), (k, values)
