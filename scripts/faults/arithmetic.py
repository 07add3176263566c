"""Arithmetic of a device port of MiniMax-M2's layer, in stages; a planted mistake replaces one of them.

It is plain PyTorch with the numerics of a device port: q, k and v are fused, experts are grouped.
B prompts, S tokens of this pass (its rows), P tokens of the past, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.weight_names import expert_weight

# Takes a site's name and value, shows the value, and returns it.
Tap = Callable[[str, torch.Tensor], torch.Tensor]


class FusedWeights(nn.Module):
    """The weights of a device port's layer: q, k and v fused, experts grouped."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    o_proj: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    gate: torch.Tensor
    bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        shapes = {
            "input_norm": (hidden,),
            "post_norm": (hidden,),
            "qkv": (query + 2 * key, hidden),
            "o_proj": (hidden, query),
            "q_norm": (query,),
            "k_norm": (key,),
            "gate_up": (experts, 2 * inner, hidden),
            "down": (experts, hidden, inner),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape))
        # The router stays in float32 when the module is cast to BF16.
        self.register_buffer("gate", torch.empty((experts, hidden), dtype=torch.float32))
        self.register_buffer("bias", torch.empty(experts, dtype=torch.float32))


class Stages:
    """Parts that both halves of a layer share: parameters and norms.

    Args:
        config: Quantities of the model, with Hugging Face's names.
        weights: The module that holds the weights.
    """

    def __init__(self, config: Any, weights: FusedWeights) -> None:
        self.config = config
        self.weights = weights

    def block_norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute input_norm or post_norm on states [...,H]."""
        return self.normalise(states, weight)

    def normalise(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute RMSNorm over the last dim of states [...,H] with float32 statistics."""
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps())
        return weight * exact.to(states.dtype)

    def eps(self) -> float:
        """Return the number that is added to the mean square."""
        return float(self.config.rms_norm_eps)


class AttentionStages(Stages):
    """Norms, projections, rotation and attention."""

    def input_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Compute input_norm, [B,S,H]."""
        return self.block_norm(states, self.weights.input_norm)

    def q_norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Compute q_norm over the whole width, [B,S,N·D]."""
        return self.head_norm(flat, self.weights.q_norm)

    def k_norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Compute k_norm over the whole width, [B,S,K·D]."""
        return self.head_norm(flat, self.weights.k_norm)

    def head_norm(self, flat: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute q_norm or k_norm; a mistake of both replaces this."""
        return self.normalise(flat, weight)

    def project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project [B,S,H] to q [B,S,N·D], k and v [B,S,K·D]."""
        q, k, v = functional.linear(normed, self.weights.qkv).split(self.widths(), dim=-1)
        return q, k, v

    def widths(self) -> tuple[int, int, int]:
        """Return the widths of q, k and v."""
        key_width = self.config.num_key_value_heads * self.config.head_dim
        return self.config.num_attention_heads * self.config.head_dim, key_width, key_width

    def norm_and_rotate(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, tap: Tap
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and rotate q [B,S,N·D] and k [B,S,K·D] to [B,N,S,D] and [B,K,S,D]; `tap` shows and returns a value."""
        q, k = tap("q_norm", self.q_norm(q)), tap("k_norm", self.k_norm(k))
        return (
            tap("q_rope", self.rotate(self.heads(q), positions)),
            tap("k_rope", self.rotate(self.heads(k), positions)),
        )

    def heads(self, flat: torch.Tensor) -> torch.Tensor:
        """Split [B,S,heads·D] into [B,heads,S,D]."""
        heads: torch.Tensor = flat.unflatten(-1, (-1, self.config.head_dim))
        return heads.transpose(1, 2)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the first dims of each head, [B,heads,S,D]."""
        width = self.rotary_width()
        turned = self.turn(heads[..., :width], self.angles(positions))
        return torch.cat((turned, heads[..., width:]), dim=-1)

    def rotary_width(self) -> int:
        """Return the number of dims of a head that are rotated."""
        return int(self.config.rotary_dim)

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Compute the angles, float32 [B,1,S,width/2]."""
        return positions[:, None, :, None].float() * self.frequencies(positions.device)

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Compute the frequencies, float32 [width/2]."""
        width = self.rotary_width()
        return self.ladder(width, width, float(self.config.rope_theta), device)

    def ladder(self, width: int, divisor: int, theta: float, device: torch.device) -> torch.Tensor:
        """Compute theta^(−dim ∕ divisor) for dims 0, 2, 4, … below `width`, float32 [width/2]."""
        dims = torch.arange(0, width, 2, dtype=torch.float32, device=device)
        return 1.0 / theta ** (dims / divisor)

    def turn(self, part: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotate all dims of [B,heads,S,width], pairing i with i + width/2."""
        cos, sin = angles.cos().to(part.dtype), angles.sin().to(part.dtype)
        first, second = part.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def repeat(self, heads: torch.Tensor) -> torch.Tensor:
        """Repeat kv heads [B,K,…] to [B,N,…]: neighbouring query heads share one."""
        return heads.repeat_interleave(self.group_size(), dim=1)

    def group_size(self) -> int:
        """Return the number of query heads per kv head."""
        return int(self.config.num_attention_heads // self.config.num_key_value_heads)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend with q [B,N,S,D] to k and v [B,K,P+S,D]; the mask is [B,P+S], the context [B,S,N·D]."""
        scores = self.attention_scores(q, self.repeat(k))
        scores = torch.where(self.visible(mask, q.shape[2]), scores, torch.finfo(torch.float32).min)
        context = torch.matmul(self.attention_weights(scores).to(v.dtype), self.repeat(v))
        return context.transpose(1, 2).flatten(2)

    def attention_scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Compute the scaled scores, float32 [B,N,S,P+S]."""
        scale = 1 / math.sqrt(self.config.head_dim)
        return torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale

    def visible(self, mask: torch.Tensor, num_queries: int) -> torch.Tensor:
        """Mark what each of the last `num_queries` tokens sees: real tokens up to itself, bool [B,1,S,P+S]."""
        return self.causal(mask.shape[1], num_queries, mask.device) & mask[:, None, None, :].bool()

    def causal(self, length: int, num_queries: int, device: torch.device) -> torch.Tensor:
        """Mark the tokens up to each of the last `num_queries` of `length`, padding too, bool [S,P+S]."""
        places = torch.arange(length, device=device)
        return places <= places[length - num_queries :, None]

    def attention_weights(self, scores: torch.Tensor) -> torch.Tensor:
        """Compute the softmax in float32."""
        return scores.softmax(-1)

    def project_out(self, context: torch.Tensor) -> torch.Tensor:
        """Project the context [B,S,N·D] to attn_delta [B,S,H]."""
        return functional.linear(context, self.weights.o_proj)

    def add_attention(self, states: torch.Tensor, delta: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Add attn_delta to the layer's input: attn_residual [B,S,H]; a mistake may add `normed` instead."""
        return states + delta


_SLAB = 16  # number of experts in a slab


class MoeStages(Stages):
    """Norm, router and experts."""

    def post_norm(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Compute post_norm, [B,S,H]; a mistake may take `states`, the layer's input, for the residual."""
        return self.block_norm(residual, self.weights.post_norm)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the router's logits, float32 [T,E]."""
        logits: torch.Tensor = tokens.float() @ self.weights.gate.T
        return logits

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the scores of logits [T,E], each between 0 and 1."""
        return logits.sigmoid()

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Choose the experts of each token, int64 [T,k]; the bias takes part in nothing else."""
        return self.best(scores + self.bias())

    def bias(self) -> torch.Tensor:
        """Return the correction bias, float32 [E]."""
        return self.weights.bias

    def best(self, biased: torch.Tensor) -> torch.Tensor:
        """Return the experts with the highest biased scores [T,E]."""
        return biased.topk(self.config.num_experts_per_tok, dim=-1).indices

    def weigh(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Compute the routing weights, float32 [T,k]: unbiased scores that sum to one."""
        return self.balance(self.scores(logits).gather(-1, experts))

    def balance(self, chosen: torch.Tensor) -> torch.Tensor:
        """Divide the chosen scores [T,k] by their sum."""
        return chosen / chosen.sum(-1, keepdim=True)

    def mix_experts(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, real: torch.Tensor
    ) -> torch.Tensor:
        """Run the tokens [T,H] through all experts, and add up with the routing weights.

        Chosen experts and their weights are [T,k]; `real` is bool [T], False for padding.
        """
        affinities = self.affinities(experts, weights, real)
        total = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        for start in range(0, affinities.shape[1], _SLAB):
            slab = slice(start, start + _SLAB)
            shares = affinities[:, slab].T[:, :, None]
            total = self.accumulate(total, self.expert_outputs(tokens, slab, shares))
        return total.to(tokens.dtype)

    def affinities(self, experts: torch.Tensor, weights: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """Compute each expert's share, float32 [T,E]; 0 if the token did not choose it. A mistake may use `real`."""
        numbers = torch.arange(self.config.num_local_experts, device=experts.device)
        return torch.where(experts[:, :, None] == numbers, weights[:, :, None], 0.0).sum(1)

    def expert_outputs(self, tokens: torch.Tensor, slab: slice, shares: torch.Tensor) -> torch.Tensor:
        """Compute the output of each expert times its share [slab,T,1], float32 [slab,T,H]."""
        inner = self.activated(tokens, slab)
        return torch.matmul(inner, self.weights.down[slab].transpose(1, 2)).float() * shares

    def activated(self, tokens: torch.Tensor, slab: slice) -> torch.Tensor:
        """Compute the activation [slab,T,I] of [T,H]; a mistake may give each expert its own input [slab,T,H]."""
        gate, up = self.cut_gate_up(torch.matmul(tokens, self.weights.gate_up[slab].transpose(1, 2)))
        return self.activate(gate, up)

    def cut_gate_up(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut […,2I] into gate and up."""
        gate, up = both.chunk(2, dim=-1)
        return gate, up

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Compute SwiGLU."""
        return functional.silu(gate) * up

    def accumulate(self, total: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Add the outputs of a slab [slab,T,H] to the sum so far [T,H]."""
        return total + outputs.sum(0)

    def finish_moe(self, moe: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return moe_delta [B,S,H]; a mistake may use the mask [B,S]."""
        return moe

    def add_moe(self, residual: torch.Tensor, moe: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Add moe_delta to attn_residual: the layer's output [B,S,H]; a mistake may add it to `states`, its input."""
        return residual + moe


KeyValues = tuple[torch.Tensor, torch.Tensor]


class Arithmetic(AttentionStages, MoeStages):
    """The right arithmetic. A mistake replaces some of its methods."""

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
