"""Device layer: mm2's own decoder layer for a device, with static shapes and weights as graph inputs.

One resident layer serves all layers of its kind: its parameters are refilled, and its graphs stay. Each of several
ranks holds some of the heads (see `HeadLayout`), and a part of the experts and of every MLP. Sums over the ranks
complete attention, experts and MLP.
Shapes: B batch, S sequence, P tokens of the past, T tokens (B·S), H hidden, N heads, K kv heads, D head_dim,
G heads per kv head.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from minimax_tools.checkpoint.filling import unchanged
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.graph import ModelGraph, QkNorm
from minimax_tools.model.site_layouts import Sharded
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    GATE,
    INDEXER,
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
    V_BIAS,
    V_PROJ,
)
from minimax_tools.reference.layer import ReferenceLayer
from neuron.builtin.modules import (
    BIAS_AXES,
    COLUMN_AXES,
    ROW_AXES,
    DeviceMlp,
    RMSNorm,
    UndrawnLinear,
    behind,
    ranks_of,
)
from neuron.builtin.moe import CHUNK_SIZE_BYTES, DeviceMoe
from neuron.builtin.rank_cut import HeadLayout, RankCut
from neuron.devices.spmd import Axes
from neuron.devices.weights import Weight, read_in_place

# Rotated keys and values of the kv heads that a rank holds, [B,K,P,D] each.
KeyValues = tuple[torch.Tensor, torch.Tensor]

# Weights that every rank holds whole.
_WHOLE_NAMES = (INPUT_NORM, POST_NORM, GATE, CORRECTION_BIAS)


class DeviceAttention(nn.Module):
    """Grouped-query attention with partial rotary embedding; q and k are normed over all heads, over each, or not.

    In a sparse layer (`is_sparse`) the indexer's weights are held and not used: it hides nothing in short rows.
    """

    def __init__(self, config: Any, *, is_sparse: bool) -> None:
        super().__init__()
        self._ranks = ranks_of(config)  # `config.ranks`; a single rank without it
        self._graph: ModelGraph = config.graph
        self._layout = HeadLayout(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            num_ranks=self._ranks.degree,
        )
        self._heads = self._layout.query_heads(self._ranks.rank)
        self._kv_heads = self._layout.kv_heads(self._ranks.rank)
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim
        self.rope_theta = config.rope_theta
        query_width, key_width = len(self._heads) * self.head_dim, len(self._kv_heads) * self.head_dim
        has_bias = self._graph.has_qkv_bias
        self.q_proj = UndrawnLinear(config.hidden_size, query_width, bias=has_bias)
        self.k_proj = UndrawnLinear(config.hidden_size, key_width, bias=has_bias)
        self.v_proj = UndrawnLinear(config.hidden_size, key_width, bias=has_bias)
        self.o_proj = UndrawnLinear(query_width, config.hidden_size, bias=self._graph.has_output_bias)
        self._norms_heads = self._graph.qk_norm is QkNorm.PER_HEAD
        if self._graph.has_qk_norm:
            self.q_norm = RMSNorm(self.head_dim if self._norms_heads else query_width, config)
            self.k_norm = RMSNorm(self.head_dim if self._norms_heads else key_width, config)
        sparsity = self._graph.sparsity if is_sparse else None
        if sparsity is not None:
            width, dim = sparsity.num_heads * sparsity.head_dim, sparsity.head_dim
            self.index_q_proj = UndrawnLinear(config.hidden_size, width)
            self.index_k_proj = UndrawnLinear(config.hidden_size, dim)
            self.index_q_norm, self.index_k_norm = RMSNorm(dim, config), RMSNorm(dim, config)
        # Modules of no effect: sites where the rotated queries and keys are captured.
        self.q_rope = nn.Identity()
        self.k_rope = nn.Identity()
        if self._ranks.are_several and self._graph.qk_norm is QkNorm.ALL_HEADS:
            # For each index of this rank's keys: 1 if the sum over all ranks counts it here; 0 for padding, and for a
            # kv head of which another copy counts.
            is_first = torch.tensor(self._layout.is_first_copy(self._ranks.rank), dtype=torch.float32)
            self.key_share = nn.Buffer(is_first.repeat_interleave(self.head_dim), persistent=False)

    def weights(self, tensors: LayerTensors) -> dict[str, Weight]:
        """Return this rank's weights of the attention, not yet read, by the hub's names relative to the layer."""
        query_rows = RankCut.of_heads(self._heads, head_dim=self.head_dim, dim=0)
        key_rows = RankCut.of_heads(self._kv_heads, head_dim=self.head_dim, dim=0)
        cuts = {
            **dict.fromkeys((Q_PROJ, Q_BIAS), query_rows),
            **dict.fromkeys((K_PROJ, V_PROJ, K_BIAS, V_BIAS), key_rows),
            O_PROJ: RankCut.of_heads(self._heads, head_dim=self.head_dim, dim=1),
        }
        if O_BIAS in tensors:
            # A sum over the ranks counts it once.
            (size,) = tensors.given_shape(O_BIAS)
            cuts[O_BIAS] = RankCut.of_lead(size, rank=self._ranks.rank)
        if not self._norms_heads:
            # A norm of each head has one weight for all of them.
            cuts |= {Q_NORM: query_rows, K_NORM: key_rows}
        return {
            name: cuts[name].weight(tensors, name) if name in cuts else unchanged(tensors, name)
            for name in (*cuts, Q_NORM, K_NORM, *INDEXER)
            if name in tensors
        }

    @property
    def shardings(self) -> dict[str, Axes]:
        """For each dim of each weight, the mesh axes over which devices of one process divide it; see `Spmd`."""
        biased = ("q_proj", "k_proj", "v_proj")
        return {
            **{f"{name}.weight": ROW_AXES for name in biased},
            **({f"{name}.bias": BIAS_AXES for name in biased} if self._graph.has_qkv_bias else {}),
            "o_proj.weight": COLUMN_AXES,
        }

    def site_layouts(self) -> dict[Site, Sharded]:
        """Return how the ranks' parts of a site join, for each site that is divided; {} on one rank.

        The blocks of a layout are heads: those of rank 0, then of rank 1, and so on.
        """
        if not self._ranks.are_several:
            return {}
        queries, keys = self._layout.all_query_heads(), self._layout.all_kv_heads()
        return {
            **dict.fromkeys((Site.Q_PROJ, Site.Q_NORM, Site.ATTN_CONTEXT), Sharded(dim=-1, blocks=queries)),
            **dict.fromkeys((Site.K_PROJ, Site.K_NORM, Site.V_PROJ), Sharded(dim=-1, blocks=keys)),
            Site.Q_ROPE: Sharded(dim=1, blocks=queries),
            Site.K_ROPE: Sharded(dim=1, blocks=keys),
        }

    def forward(
        self,
        states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: KeyValues | None,
    ) -> tuple[torch.Tensor, KeyValues]:
        """Return attn_delta [B,S,H], and the past together with these tokens' keys and values.

        The normed states are [B,S,H], the mask [B,P+S] of 0/1, the positions [B,S]. Without a past, give None.
        """
        cos, sin = self._rotation(position_ids, states.dtype)
        queries, keys = self.q_proj(states), self.k_proj(states)
        if self._graph.has_qk_norm:
            query_square, key_square = self._mean_squares(queries, keys)
            queries, keys = self.q_norm(queries, query_square), self.k_norm(keys, key_square)
        q_bnsd = self.q_rope(_rotate(self._split_heads(queries), cos, sin))
        k_bksd = self.k_rope(_rotate(self._split_heads(keys), cos, sin))
        v_bksd = self._split_heads(self.v_proj(states))
        if past_key_value is not None:
            k_bksd = torch.cat((past_key_value[0], k_bksd), dim=2)
            v_bksd = torch.cat((past_key_value[1], v_bksd), dim=2)
        context_bnsd = self._attend(q_bnsd, k_bksd, v_bksd, attention_mask)
        delta: torch.Tensor = self.o_proj(context_bnsd.transpose(1, 2).flatten(2))
        return self._ranks.reduce(delta, dtype=delta.dtype), (k_bksd, v_bksd)

    def _mean_squares(
        self, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return mean squares over the width of all ranks, [B,S,1] float32; None on one rank, or for each head."""
        if self._norms_heads or not self._ranks.are_several:
            # Each norm computes its own.
            return None, None
        # Padding is zero. Of a kv head that several ranks hold, one copy counts.
        sums = torch.stack(
            (queries.float().square().sum(dim=-1), (keys.float().square() * self.key_share).sum(dim=-1)),
            dim=-1,
        )
        sums = self._ranks.add_up(sums)
        query_sum, key_sum = sums.chunk(2, dim=-1)
        # The widths of all ranks, padding and copies left out.
        query_width = self._layout.num_heads * self.head_dim
        return query_sum / query_width, key_sum / (self._layout.num_kv_heads * self.head_dim)

    def _split_heads(self, flat: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = flat.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def _rotation(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [B,1,S,rotary_dim], computed in float32, in the dtype of the states."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device=position_ids.device)
        frequencies = 1.0 / self.rope_theta ** (exponents / self.rotary_dim)
        angles = position_ids[:, None, :, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _attend(
        self, q_bnsd: torch.Tensor, k_bksd: torch.Tensor, v_bksd: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend with scores and softmax in float32; query head j reads kv head j // G."""
        q_bkgsd = q_bnsd.unflatten(1, (len(self._kv_heads), -1))
        scores = torch.matmul(q_bkgsd.float(), k_bksd[:, :, None].float().transpose(-1, -2))
        scores = scores * self.head_dim**-0.5
        # Tokens are numbered from the first query on: the past has negative numbers, and every query sees all of it.
        num_past = k_bksd.shape[2] - q_bnsd.shape[2]
        key_tokens = torch.arange(-num_past, q_bnsd.shape[2], device=q_bnsd.device)
        query_tokens = key_tokens[num_past:]
        is_causal = key_tokens[None, :] <= query_tokens[:, None]
        visible = is_causal & attention_mask[:, None, None, None, :].bool()
        # A finite minimum: a padded query without visible keys must not become NaN.
        scores = torch.where(visible, scores, torch.finfo(torch.float32).min)
        weights = scores.softmax(dim=-1).to(v_bksd.dtype)
        return torch.matmul(weights, v_bksd[:, :, None]).flatten(1, 2)


class DeviceLayer(nn.Module):
    """The builtin target, built as `DeviceLayer(config, layer_idx)` and reused for every layer of its kind.

    On a lazy device a forward pass runs as three graphs: attention and router, one expert chunk (run once per chunk),
    and the residual addition, after a shared expert if there is one. A dense layer is one graph. A chunk has at most
    `chunk_size_bytes` of weights. `layer_idx` tells the layer's kind, and changes nothing else.
    """

    reuse = True
    takes_own_names = True  # see `neuron.ports.hub_names`
    # Submodules have the reference layer's names, except that the router is a single submodule here.
    sites: Mapping[str, str] = MappingProxyType(
        {
            **ReferenceLayer.sites,
            str(Site.ROUTER_LOGITS): "block_sparse_moe.gate:output[0]",
            str(Site.ROUTER_WEIGHTS): "block_sparse_moe.gate:output[1]",
            str(Site.ROUTER_EXPERTS): "block_sparse_moe.gate:output[2]",
        }
    )

    def __init__(self, config: Any, layer_idx: int, *, chunk_size_bytes: int = CHUNK_SIZE_BYTES) -> None:
        super().__init__()
        graph: ModelGraph = config.graph
        kind = graph.layer(layer_idx)
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.self_attn = DeviceAttention(config, is_sparse=kind.is_sparse)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self._is_dense = kind.is_dense
        if kind.is_dense:
            self.mlp = DeviceMlp(config, graph.dense_width)
        else:
            self.block_sparse_moe = DeviceMoe(config, chunk_size_bytes=chunk_size_bytes)
        layouts, places = self.self_attn.site_layouts(), type(self).sites
        # On several ranks a path is followed by its layout, as in "self_attn.q_proj@shard(-1; 0,1,2,3)".
        self.sites = {
            str(site): f"{places[site]}{layouts.get(site, '')}" for site in kind.sites if site in places
        }

    @property
    def _mlp(self) -> tuple[str, DeviceMlp | DeviceMoe]:
        """The experts, or the MLP in their place, with its name."""
        return ("mlp", self.mlp) if self._is_dense else ("block_sparse_moe", self.block_sparse_moe)

    @property
    def shardings(self) -> Mapping[str, Axes]:
        """For each dim of each weight, the mesh axes over which devices of one process divide it; see `Spmd`."""
        # Experts are divided among groups of devices, all else among all devices.
        path, mlp = self._mlp
        return behind("self_attn", self.self_attn.shardings) | behind(path, mlp.shardings)

    @read_in_place
    def convert_state_dict(self, tensors: LayerTensors, config: Any, layer_idx: int) -> dict[str, Weight]:
        """Return the layer's weights under this module's names. Loading reads them straight into its parameters."""
        path, mlp = self._mlp
        return {
            **self.self_attn.weights(tensors),
            **{name: unchanged(tensors, name) for name in _WHOLE_NAMES if name in tensors},
            **behind(path, mlp.weights(tensors, path=path)),
        }

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_value: KeyValues | None = None,
    ) -> tuple[torch.Tensor, KeyValues]:
        """Return the layer's output [B,S,H], and keys and values [B,K,P+S,D] with the past first.

        The layer's input is [B,S,H], the mask [B,P+S] of 0/1, the positions [B,S]. Without a past, give None.
        """
        attn_delta, key_value = self.self_attn(
            self.input_layernorm(hidden_states), attention_mask, position_ids, past_key_value
        )
        residual = hidden_states + attn_delta
        normed = self.post_attention_layernorm(residual)
        _, mlp = self._mlp
        output: torch.Tensor = residual + mlp(normed)
        return output, key_value


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first dims of every head [B,heads,S,D], pairing dim i with i + rotary_dim/2."""
    rotary_dim = cos.shape[-1]
    turning, still = heads[..., :rotary_dim], heads[..., rotary_dim:]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, still), dim=-1)
