"""ReferenceLayer: a decoder layer in plain PyTorch, written to be read; every site is exposed.

Parameters have mm2's names, which are MiniMax-M2's on the hub: its layers load unchanged. `config`
is a port's, or a `ModelSpec`.
B batch, S sequence, T tokens (B·S), H hidden, N heads, K kv heads, D head_dim, E experts, k experts per token. The end
of a name such as `q_bnsd` gives its dims: [B,N,S,D].
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from minimax_tools.model.families import FAMILIES
from minimax_tools.model.graph import ModelGraph, QkNorm
from minimax_tools.model.router import Router
from minimax_tools.model.sites import Site


def graph_of(config: Any) -> ModelGraph:
    """Return the graph of a config: its own, else that of its model type."""
    own: ModelGraph | None = getattr(config, "graph", None)
    return FAMILIES[config.model_type].read_graph(vars(config)) if own is None else own


def expert_width_of(config: Any) -> int:
    """Return the intermediate size of an expert: config.json may have another one beside it."""
    width: int = getattr(config, "moe_intermediate_size", config.intermediate_size)
    return width


def router_dtype_of(config: Any) -> torch.dtype:
    """Return the dtype of the router's tensors in a layer that is being built under torch's default dtype."""
    return torch.float32 if graph_of(config).has_float32_router else torch.get_default_dtype()


class ReferenceNorm(nn.Module):
    """RMSNorm with float32 statistics, over parts of the last dim that are as long as the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise [..., width], or each head of [..., heads·width]."""
        width = len(self.weight)
        parts = states if states.shape[-1] == width else states.unflatten(-1, (-1, width))
        parts_f32 = parts.float()
        normed = parts_f32 * torch.rsqrt(parts_f32.pow(2).mean(-1, keepdim=True) + self.eps)
        weighted: torch.Tensor = self.weight * normed.to(states.dtype)
        return weighted.reshape(states.shape)


class ReferenceAttention(nn.Module):
    """Attention: q_norm and k_norm span all heads or each one, and RoPE rotates the first dims of each head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        is_per_head = graph_of(config).qk_norm is QkNorm.PER_HEAD
        self.q_norm = ReferenceNorm(config.head_dim if is_per_head else query_width, config.rms_norm_eps)
        self.k_norm = ReferenceNorm(config.head_dim if is_per_head else key_width, config.rms_norm_eps)
        self.q_rope, self.k_rope = nn.Identity(), nn.Identity()

    def forward(
        self, states: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute attn_delta [B,S,H] from normed states [B,S,H]."""
        q_bnsd = self.q_rope(self.rotate(self.heads(self.q_norm(self.q_proj(states))), position_ids))
        k_bksd = self.k_rope(self.rotate(self.heads(self.k_norm(self.k_proj(states))), position_ids))
        v_bksd = self.heads(self.v_proj(states))
        context = self.attend(q_bnsd, self.repeat(k_bksd), self.repeat(v_bksd), attention_mask)
        delta: torch.Tensor = self.o_proj(context)
        return delta

    def heads(self, flat: torch.Tensor) -> torch.Tensor:
        """Reshape [B,S,heads·D] to [B,heads,S,D]."""
        heads: torch.Tensor = flat.unflatten(-1, (-1, self.config.head_dim))
        return heads.transpose(1, 2)

    def rotate(self, heads: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Rotate dims 0 to rotary_dim of every head [B,heads,S,D], pairing dim i with i + rotary_dim/2."""
        rotary_dim = self.config.rotary_dim
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=heads.device) / rotary_dim
        angles = position_ids[:, None, :, None].float() / self.config.rope_theta**exponents
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*turned, heads[..., rotary_dim:]), dim=-1)

    def repeat(self, heads: torch.Tensor) -> torch.Tensor:
        """Expand [B,K,S,D] to [B,N,S,D]: query head j reads kv head j // (N/K)."""
        heads_per_kv = self.config.num_attention_heads // self.config.num_key_value_heads
        return heads.repeat_interleave(heads_per_kv, dim=1)

    def attend(
        self, q_bnsd: torch.Tensor, k_bnsd: torch.Tensor, v_bnsd: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Compute causal attention [B,S,N·D] with padded keys hidden; scores and softmax are float32."""
        scores = q_bnsd.float() @ k_bnsd.float().transpose(-1, -2) * self.config.head_dim**-0.5
        length = scores.shape[-1]
        causal = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
        visible = causal & attention_mask[:, None, None, :].bool()
        # A finite minimum: a padded query that sees nothing must not become NaN.
        scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
        context = scores.softmax(dim=-1).to(v_bnsd.dtype) @ v_bnsd
        return context.transpose(1, 2).flatten(2)


class ReferenceExpert(nn.Module):
    """An expert: w2(silu(w1 x) ⊙ w3 x)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = expert_width_of(config)
        self.w1 = nn.Linear(config.hidden_size, width, bias=False)
        self.w2 = nn.Linear(width, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Run the expert on [T,H]: [T,H]."""
        output: torch.Tensor = self.w2(nn.functional.silu(self.w1(states)) * self.w3(states))
        return output


class ReferenceGate(nn.Module):
    """The router's projection, in float32 or in the dtype of the states."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.is_float32 = graph_of(config).has_float32_router
        shape = (config.num_local_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=router_dtype_of(config)))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the logits [T,E] of [T,H]: float32, or in the dtype of the states."""
        return (states.float() if self.is_float32 else states) @ self.weight.T


class ReferenceRouter(nn.Module):
    """The choice of experts by biased scores, and their weights by unbiased scores."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, logits: torch.Tensor, correction_bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return experts [T,k] and their weights [T,k], in the dtype of the logits [T,E]."""
        router = Router(spec=self.config, bias=correction_bias)
        # Scores are float32, even where logits are not.
        scores = router.scores(logits if self.config.graph.has_float32_router else logits.float())
        experts = router.choose(scores)
        return experts, router.shares(scores, experts).to(logits.dtype)


class ReferenceMoe(nn.Module):
    """The mixture of experts; the outputs of each token's k experts are summed in float32."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = ReferenceGate(config)
        self.router = ReferenceRouter(config)
        has_bias = graph_of(config).has_correction_bias
        bias = torch.empty(config.num_local_experts, dtype=router_dtype_of(config)) if has_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.experts = nn.ModuleList(ReferenceExpert(config) for _ in range(config.num_local_experts))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute moe_delta [B,S,H] from normed states [B,S,H]."""
        states_th = states.flatten(0, 1)
        experts, weights = self.router(self.gate(states_th), self.e_score_correction_bias)
        total = torch.zeros(states_th.shape, dtype=torch.float32, device=states.device)
        for number, expert in enumerate(self.experts):
            # Every token goes through every expert: lazy devices recompile when a shape depends on the routing.
            affinity = torch.where(experts == number, weights, 0.0).sum(-1, keepdim=True)
            total = total + expert(states_th).float() * affinity
        return total.to(states.dtype).view(states.shape)


class ReferenceLayer(nn.Module):
    """The decoder layer, built as any target is: `ReferenceLayer(config, layer_idx)`.

    `sites` names the module that shows each site, in the notation of a port's `sites`. The layer's own input and output
    need no name.
    """

    takes_own_names = True  # in all families its weights come by mm2's names

    sites: Mapping[str, str] = MappingProxyType(
        {
            str(Site.INPUT_NORM): "input_layernorm",
            str(Site.Q_PROJ): "self_attn.q_proj",
            str(Site.K_PROJ): "self_attn.k_proj",
            str(Site.V_PROJ): "self_attn.v_proj",
            str(Site.Q_NORM): "self_attn.q_norm",
            str(Site.K_NORM): "self_attn.k_norm",
            str(Site.Q_ROPE): "self_attn.q_rope",
            str(Site.K_ROPE): "self_attn.k_rope",
            str(Site.ATTN_CONTEXT): "self_attn.o_proj:input",
            str(Site.ATTN_DELTA): "self_attn",
            str(Site.ATTN_RESIDUAL): "post_attention_layernorm:input",
            str(Site.POST_NORM): "post_attention_layernorm",
            str(Site.ROUTER_LOGITS): "block_sparse_moe.gate",
            str(Site.ROUTER_EXPERTS): "block_sparse_moe.router:output[0]",
            str(Site.ROUTER_WEIGHTS): "block_sparse_moe.router:output[1]",
            str(Site.MOE_DELTA): "block_sparse_moe",
        }
    )

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = ReferenceNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = ReferenceAttention(config)
        self.post_attention_layernorm = ReferenceNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = ReferenceMoe(config)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute the layer's output [B,S,H] from its input [B,S,H], a 0/1 mask [B,S] and positions [B,S]."""
        normed = self.input_layernorm(hidden_states)
        residual = hidden_states + self.self_attn(normed, attention_mask, position_ids)
        output: torch.Tensor = residual + self.block_sparse_moe(self.post_attention_layernorm(residual))
        return output
