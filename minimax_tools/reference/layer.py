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
from minimax_tools.reference.float32_stages import activate


def graph_of(config: Any) -> ModelGraph:
    """Return the graph of a config: its own, else that of its model type."""
    own: ModelGraph | None = getattr(config, "graph", None)
    return FAMILIES[config.model_type].read_graph(vars(config)) if own is None else own


def expert_width_of(config: Any) -> int:
    """Return the intermediate size of an expert: config.json may have another one beside it."""
    has_own_key = hasattr(config, "moe_intermediate_size")
    width: int = config.moe_intermediate_size if has_own_key else config.intermediate_size
    return width


def router_dtype_of(config: Any) -> torch.dtype:
    """Return the dtype of the router's tensors in a layer that is being built under torch's default dtype."""
    return torch.float32 if graph_of(config).has_float32_router else torch.get_default_dtype()


class ReferenceNorm(nn.Module):
    """RMSNorm with float32 statistics, over parts of the last dim that are as long as the weight."""

    def __init__(self, width: int, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = config.rms_norm_eps
        self.has_gain_of_one_plus = graph_of(config).has_gain_of_one_plus

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise [..., width], or each head of [..., heads·width]."""
        width = self.weight.shape[-1]
        parts = states if states.shape[-1] == width else states.unflatten(-1, (-1, width))
        parts_f32 = parts.float()
        normed = parts_f32 * torch.rsqrt(parts_f32.pow(2).mean(-1, keepdim=True) + self.eps)
        weighted: torch.Tensor
        if self.has_gain_of_one_plus:
            weighted = (normed * (1.0 + self.weight.float())).to(states.dtype)
        else:
            weighted = self.weight * normed.to(states.dtype)
        return weighted.reshape(states.shape)


class ReferenceAttention(nn.Module):
    """Attention: q_norm and k_norm span all heads or each one, and RoPE rotates the first dims of each head.

    In a sparse layer (`is_sparse`) the indexer's weights are held and not used: it hides nothing in short rows.
    """

    def __init__(self, config: Any, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.config, graph = config, graph_of(config)
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=graph.has_qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=graph.has_qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=graph.has_qkv_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=graph.has_output_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if graph.has_qk_norm:
            is_per_head = graph.qk_norm is QkNorm.PER_HEAD
            self.q_norm = ReferenceNorm(config.head_dim if is_per_head else query_width, config)
            self.k_norm = ReferenceNorm(config.head_dim if is_per_head else key_width, config)
        if is_sparse and graph.sparsity is not None:
            width, dim = graph.sparsity.num_heads * graph.sparsity.head_dim, graph.sparsity.head_dim
            self.index_q_proj = nn.Linear(config.hidden_size, width, bias=False)
            self.index_k_proj = nn.Linear(config.hidden_size, dim, bias=False)
            self.index_q_norm, self.index_k_norm = (ReferenceNorm(dim, config) for _ in range(2))
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
    """A routed expert: w2(a(w1 x, w3 x)), where a combines gate and up."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.graph, width = graph_of(config), expert_width_of(config)
        self.w1 = nn.Linear(config.hidden_size, width, bias=False)
        self.w2 = nn.Linear(width, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Run the expert on [T,H]: [T,H]."""
        output: torch.Tensor = self.w2(activate(self.graph, self.w1(states), self.w3(states)))
        return output


class ReferenceMlp(nn.Module):
    """An MLP that every token takes: a shared expert, or the whole of a dense layer."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.graph = graph_of(config)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Run the MLP on [...,H]: [...,H]."""
        mixed = activate(self.graph, self.gate_proj(states), self.up_proj(states))
        output: torch.Tensor = self.down_proj(mixed)
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
        """Return experts [T,k] and their weights [T,k], float32 or in the dtype of the logits [T,E]."""
        router = Router(spec=self.config, bias=correction_bias)
        # Scores are float32, even where logits are not.
        scores = router.scores(logits if self.config.graph.has_float32_router else logits.float())
        experts = router.choose(scores)
        shares = router.shares(scores, experts)
        return experts, shares if graph_of(self.config).has_float32_shares else shares.to(logits.dtype)


class ReferenceMoe(nn.Module):
    """The mixture of experts; the outputs of each token's k experts are summed in float32."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.graph = graph_of(config)
        self.gate = ReferenceGate(config)
        self.router = ReferenceRouter(config)
        has_bias = self.graph.has_correction_bias
        bias = torch.empty(config.num_local_experts, dtype=router_dtype_of(config)) if has_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.experts = nn.ModuleList(ReferenceExpert(config) for _ in range(config.num_local_experts))
        self.routed = nn.Identity()
        if self.graph.has_shared_experts:
            self.shared_experts = ReferenceMlp(config, self.graph.shared_width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute moe_delta [B,S,H] from normed states [B,S,H]."""
        routed: torch.Tensor = self.routed(self.run_experts(states))
        if not self.graph.has_shared_experts:
            return routed
        shared: torch.Tensor = self.shared_experts(states)
        return routed * self.graph.sum_scale + shared

    def run_experts(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the sum of each token's routed experts [B,S,H] from normed states [B,S,H]."""
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
            str(Site.ROUTED_DELTA): "block_sparse_moe.routed",
            str(Site.SHARED_DELTA): "block_sparse_moe.shared_experts",
            str(Site.MOE_DELTA): "block_sparse_moe",
            str(Site.MLP_DELTA): "mlp",
        }
    )

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        graph = graph_of(config)
        kind = graph.layer(layer_idx)
        self.input_layernorm = ReferenceNorm(config.hidden_size, config)
        self.self_attn = ReferenceAttention(config, is_sparse=kind.is_sparse)
        self.post_attention_layernorm = ReferenceNorm(config.hidden_size, config)
        self.is_dense = kind.is_dense
        if kind.is_dense:
            self.mlp = ReferenceMlp(config, graph.dense_width)
        else:
            self.block_sparse_moe = ReferenceMoe(config)
        # The sites of a derived class are its own.
        if type(self).sites is ReferenceLayer.sites:
            self.sites = {name: place for name, place in self.sites.items() if name in kind.sites}

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Compute the layer's output [B,S,H] from its input [B,S,H], a 0/1 mask [B,S] and positions [B,S]."""
        normed = self.input_layernorm(hidden_states)
        residual = hidden_states + self.self_attn(normed, attention_mask, position_ids)
        states = self.post_attention_layernorm(residual)
        output: torch.Tensor = residual + (self.mlp if self.is_dense else self.block_sparse_moe)(states)
        return output
