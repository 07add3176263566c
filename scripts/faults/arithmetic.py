"""Arithmetic of a device port's layer, of any family, in stages; a planted mistake replaces one of them.

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
from minimax_tools.model.graph import ModelGraph, QkNorm, RouterScores
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    DENSE_MLP,
    GATE,
    INPUT_NORM,
    K_BIAS,
    K_NORM,
    K_PROJ,
    O_BIAS,
    O_PROJ,
    POST_NORM,
    Q_BIAS,
    Q_NORM,
    Q_PROJ,
    SHARED_MLP,
    V_BIAS,
    V_PROJ,
    MlpNames,
)

# Takes a site's name and value, shows the value, and returns it.
Tap = Callable[[str, torch.Tensor], torch.Tensor]


class FusedWeights(nn.Module):
    """The weights of a device port's layer: q, k and v fused, experts grouped, gate and up of each MLP fused.

    Those that the layer's graph lacks are not there.

    Args:
        config: Quantities and graph of the model, with Hugging Face's names.
        layer_idx: Number of the layer.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    o_proj: torch.Tensor
    o_bias: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    gate: torch.Tensor
    bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    mlp_gate_up: torch.Tensor
    mlp_down: torch.Tensor

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        graph: ModelGraph = config.graph
        kind = graph.layer(layer_idx)
        hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_local_experts
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_norm": (hidden,),
            "post_norm": (hidden,),
            "qkv": (query + 2 * key, hidden),
            "o_proj": (hidden, query),
        }
        if graph.has_qkv_bias:
            shapes["qkv_bias"] = (query + 2 * key,)
        if graph.has_output_bias:
            shapes["o_bias"] = (hidden,)
        if graph.has_qk_norm:
            widths = (config.head_dim,) * 2 if graph.qk_norm is QkNorm.PER_HEAD else (query, key)
            shapes |= {name: (width,) for name, width in zip(("q_norm", "k_norm"), widths, strict=True)}
        width = graph.dense_width if kind.is_dense else graph.shared_width
        if width:
            shapes |= {"mlp_gate_up": (2 * width, hidden), "mlp_down": (hidden, width)}
        if not kind.is_dense:
            shapes |= {"gate_up": (experts, 2 * inner, hidden), "down": (experts, hidden, inner)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(shape))
        if kind.is_dense:
            return
        # A float32 router stays so when the module is cast to BF16.
        dtype = torch.float32 if graph.has_float32_router else None
        self.register_buffer("gate", torch.empty((experts, hidden), dtype=dtype))
        if graph.has_correction_bias:
            self.register_buffer("bias", torch.empty(experts, dtype=dtype))


class Stages:
    """Parts that both halves of a layer share: parameters and norms.

    Args:
        config: Quantities and graph of the model, with Hugging Face's names.
        weights: The module that holds the weights.
        layer_idx: Number of the layer.
    """

    def __init__(self, config: Any, weights: FusedWeights, layer_idx: int) -> None:
        self.config = config
        self.weights = weights
        self.graph: ModelGraph = config.graph
        self.kind = self.graph.layer(layer_idx)

    def block_norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute input_norm or post_norm on states [...,H]."""
        return self.normalise(states, weight)

    def normalise(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute RMSNorm over the last dim of states [...,H] with float32 statistics."""
        exact = states.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps())
        return self.weigh_norm(exact, weight, states.dtype)

    def weigh_norm(self, exact: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Multiply what a norm made, in float32, by its gain, the weight or 1 + weight; the result has `dtype`."""
        if self.graph.has_gain_of_one_plus:
            return (exact * (1 + weight.float())).to(dtype)
        return weight * exact.to(dtype)

    def eps(self) -> float:
        """Return the number that is added to the mean square."""
        return float(self.config.rms_norm_eps)


class AttentionStages(Stages):
    """Norms, projections, rotation and attention."""

    def input_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Compute input_norm, [B,S,H]."""
        return self.block_norm(states, self.weights.input_norm)

    def q_norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Compute q_norm over the whole width or each head, [B,S,N·D]."""
        return self.head_norm(flat, self.weights.q_norm)

    def k_norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Compute k_norm over the whole width or each head, [B,S,K·D]."""
        return self.head_norm(flat, self.weights.k_norm)

    def head_norm(self, flat: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute q_norm or k_norm; a mistake of both replaces this."""
        return self.normalise(self.norm_parts(flat, weight), weight).view_as(flat)

    def norm_parts(self, flat: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Split [B,S,heads·D] into the parts that are normed alone, as long as the weight: one, or the heads."""
        parts: torch.Tensor = flat.unflatten(-1, (-1, weight.shape[-1]))
        return parts

    def project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project [B,S,H] to q [B,S,N·D], k and v [B,S,K·D]."""
        bias = self.qkv_bias() if self.graph.has_qkv_bias else None
        q, k, v = functional.linear(normed, self.weights.qkv, bias).split(self.widths(), dim=-1)
        return q, k, v

    def qkv_bias(self) -> torch.Tensor:
        """Return the biases of q, k and v, one after the other, [N·D + 2·K·D]."""
        return self.weights.qkv_bias

    def widths(self) -> tuple[int, int, int]:
        """Return the widths of q, k and v."""
        key_width = self.config.num_key_value_heads * self.config.head_dim
        return self.config.num_attention_heads * self.config.head_dim, key_width, key_width

    def norm_and_rotate(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, tap: Tap
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and rotate q [B,S,N·D] and k [B,S,K·D] to [B,N,S,D] and [B,K,S,D]; `tap` shows and returns a value."""
        if self.graph.has_qk_norm:
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
        bias = self.weights.o_bias if self.graph.has_output_bias else None
        return functional.linear(context, self.weights.o_proj, bias)

    def add_attention(self, states: torch.Tensor, delta: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Add attn_delta to the layer's input: attn_residual [B,S,H]; a mistake may add `normed` instead."""
        return states + delta


_SLAB = 16  # number of experts in a slab


class MoeStages(Stages):
    """Norm, router and experts; or the MLP of a dense layer."""

    def post_norm(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Compute post_norm, [B,S,H]; a mistake may take `states`, the layer's input, for the residual."""
        return self.block_norm(residual, self.weights.post_norm)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the router's logits [T,E]: float32, or in the tokens' dtype where the model's router is so."""
        logits: torch.Tensor = tokens.to(self.weights.gate.dtype) @ self.weights.gate.T
        return logits

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Compute the scores of logits [T,E], each between 0 and 1, in float32."""
        if self.graph.router_scores is RouterScores.SOFTMAX:
            return logits.float().softmax(-1)
        return logits.float().sigmoid()

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Choose the experts of each token, int64 [T,k]; the bias takes part in nothing else."""
        return self.best(scores + self.bias() if self.graph.has_correction_bias else scores)

    def bias(self) -> torch.Tensor:
        """Return the correction bias [E], where the model has one."""
        return self.weights.bias

    def best(self, biased: torch.Tensor) -> torch.Tensor:
        """Return the experts with the highest biased scores [T,E]."""
        return biased.topk(self.config.num_experts_per_tok, dim=-1).indices

    def weigh(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Compute the routing weights [T,k] of unbiased scores: float32, or in the dtype of the logits."""
        weights = self.balance(self.scores(logits).gather(-1, experts))
        return weights if self.graph.has_float32_shares else weights.to(logits.dtype)

    def balance(self, chosen: torch.Tensor) -> torch.Tensor:
        """Divide the chosen scores [T,k] by their sum, where the model does, and scale them."""
        if self.graph.normalises_shares:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen * self.graph.share_scale

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
        return torch.where(experts[:, :, None] == numbers, weights[:, :, None].float(), 0.0).sum(1)

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
        """Combine gate and up of the routed experts."""
        return self.combine(gate, up)

    def activate_mlp(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Combine gate and up of the shared experts, or of a dense layer."""
        return self.combine(gate, up)

    def combine(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Compute SwiGLU, or SwiGLU-OAI, in any MLP."""
        if not self.graph.has_swiglu_oai:
            return functional.silu(gate) * up
        gate, up = self.clamp(gate, up)
        return gate * torch.sigmoid(gate * self.alpha()) * (up + 1)

    def clamp(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Clamp gate and up of SwiGLU-OAI."""
        limit = self.graph.swiglu_limit
        return gate.clamp(max=limit), up.clamp(-limit, limit)

    def alpha(self) -> float:
        """Return the factor in the sigmoid of SwiGLU-OAI."""
        return float(self.graph.swiglu_alpha or 1.0)

    def accumulate(self, total: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """Add the outputs of a slab [slab,T,H] to the sum so far [T,H]."""
        return total + outputs.sum(0)

    def run_mlp(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the shared experts, or the MLP of a dense layer, on tokens [T,H]."""
        gate, up = functional.linear(tokens, self.weights.mlp_gate_up).chunk(2, dim=-1)
        return functional.linear(self.activate_mlp(gate, up), self.weights.mlp_down)

    def run_shared(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the shared experts on tokens [T,H]."""
        return self.run_mlp(tokens)

    def add_shared(self, routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """Add the shared experts' sum to the routed experts', which is scaled."""
        return self.scale_routed(routed) + shared

    def scale_routed(self, routed: torch.Tensor) -> torch.Tensor:
        """Scale the routed experts' sum."""
        return routed * self.graph.sum_scale

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
        """Build the state dict of the weights from the layer's tensors."""
        state = {
            "input_norm": tensors[INPUT_NORM],
            "post_norm": tensors[POST_NORM],
            "qkv": torch.cat([tensors[name] for name in (Q_PROJ, K_PROJ, V_PROJ)]),
            "o_proj": tensors[O_PROJ],
        }
        if self.graph.has_qkv_bias:
            state["qkv_bias"] = torch.cat([tensors[name] for name in (Q_BIAS, K_BIAS, V_BIAS)])
        if self.graph.has_output_bias:
            state["o_bias"] = tensors[O_BIAS]
        if self.graph.has_qk_norm:
            state |= {"q_norm": tensors[Q_NORM], "k_norm": tensors[K_NORM]}
        if self.kind.is_dense or self.graph.has_shared_experts:
            mlp = DENSE_MLP if self.kind.is_dense else SHARED_MLP
            state |= {
                "mlp_gate_up": torch.cat((tensors[mlp.gate], tensors[mlp.up])),
                "mlp_down": tensors[mlp.down],
            }
        if self.kind.is_dense:
            return state
        experts = [MlpNames.of_expert(number) for number in range(self.config.num_local_experts)]
        gate = torch.stack([tensors[expert.gate] for expert in experts])
        up = torch.stack([tensors[expert.up] for expert in experts])
        state |= {"gate": tensors[GATE], "gate_up": torch.cat((gate, up), dim=1)}
        state["down"] = torch.stack([tensors[expert.down] for expert in experts])
        if self.graph.has_correction_bias:
            state["bias"] = tensors[CORRECTION_BIAS]
        return state

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
        moe = self.run_moe(post, mask[:, -states.shape[1] :], tap)
        return self.add_moe(residual, moe, states), (k, values)

    def run_moe(self, post: torch.Tensor, mask: torch.Tensor, tap: Tap) -> torch.Tensor:
        """Compute what is added to the stream last [B,S,H] from post_norm [B,S,H]; the mask is [B,S]."""
        tokens = post.flatten(0, 1)
        if self.kind.is_dense:
            return tap("mlp_delta", self.run_mlp(tokens).view_as(post))
        logits = tap("router_logits", self.logits(tokens))
        experts = tap("router_experts", self.choose(self.scores(logits)))
        affinities = tap("router_weights", self.weigh(logits, experts))
        routed = self.mix_experts(tokens, experts, affinities, mask.flatten().bool()).view_as(post)
        if self.graph.has_shared_experts:
            routed = tap("routed_delta", routed)
            routed = self.add_shared(routed, tap("shared_delta", self.run_shared(tokens).view_as(post)))
        return tap("moe_delta", self.finish_moe(routed, mask))
