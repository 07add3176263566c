"""Mistakes of attention, of o_proj and of the residual stream."""

from __future__ import annotations

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic
from faults.plant import Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import K_PROJ, O_PROJ, Q_PROJ, V_PROJ

_CONTEXT = (Site.ATTN_CONTEXT,)


class Tiled(Arithmetic):
    """The kv heads are tiled over the query heads."""

    def repeat(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.repeat(1, self.group_size(), 1, 1)


class KeysAndValuesSwapped(Arithmetic):
    """Keys and values change places, as if the fused projection were cut in the wrong order."""

    def edit(self, tensors: LayerTensors) -> None:
        tensors[K_PROJ], tensors[V_PROJ] = tensors[V_PROJ], tensors[K_PROJ]


class QueryHeadsInterleaved(Arithmetic):
    """Query heads, which lie kv group by kv group, are taken as if the groups alternated."""

    def edit(self, tensors: LayerTensors) -> None:
        weight = tensors[Q_PROJ]
        groups = weight.unflatten(
            0, (self.config.num_key_value_heads, self.group_size(), self.config.head_dim)
        )
        tensors[Q_PROJ] = groups.transpose(0, 1).flatten(0, 2).contiguous()


class Scaled(Arithmetic):
    """Scores are `factor` times too large."""

    def attention_scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().attention_scores(q, k) * self.number("factor")


class CausalMaskMissing(Arithmetic):
    """Later tokens are visible too."""

    def causal(self, length: int, num_queries: int, device: torch.device) -> torch.Tensor:
        return torch.ones((num_queries, length), dtype=torch.bool, device=device)


class PaddingMaskMissing(Arithmetic):
    """Padding is visible."""

    def visible(self, mask: torch.Tensor, num_queries: int) -> torch.Tensor:
        return self.causal(mask.shape[1], num_queries, mask.device)[None, None]


class SlidingWindow(Arithmetic):
    """A sliding window on a model that has none; distances count real tokens, not padding."""

    def visible(self, mask: torch.Tensor, num_queries: int) -> torch.Tensor:
        places = mask.cumsum(-1)
        distance = places[:, -num_queries:, None] - places[:, None, :]
        return super().visible(mask, num_queries) & (distance < self.number("window"))[:, None]


class SoftmaxLowPrecision(Arithmetic):
    """Scores and softmax in BF16."""

    def attention_weights(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.bfloat16().softmax(-1).float()


class HeadsMissing(Arithmetic):
    """The heads of a single rank reach o_proj; the sum over ranks is missing."""

    def project_out(self, context: torch.Tensor) -> torch.Tensor:
        width = context.shape[-1] // self.parameters.tp_degree
        part = slice(self.parameters.rank * width, (self.parameters.rank + 1) * width)
        return functional.linear(context[..., part], self.weights.o_proj[:, part])


class OutputProjectionZero(Arithmetic):
    """o_proj was never loaded."""

    def edit(self, tensors: LayerTensors) -> None:
        tensors[O_PROJ] = torch.zeros_like(tensors[O_PROJ])


class DeltaScaled(Arithmetic):
    """The output is reduced over the ranks more than once, so it is `factor` times too large."""

    def project_out(self, context: torch.Tensor) -> torch.Tensor:
        return super().project_out(context) * self.number("factor")


class AttentionResidualMissing(Arithmetic):
    """The layer's input is not added to attn_delta."""

    def add_attention(self, states: torch.Tensor, delta: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return delta


class MoeResidualMissing(Arithmetic):
    """The residual is not added to moe_delta."""

    def add_moe(self, residual: torch.Tensor, moe: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return moe


class ResidualAfterNorm(Arithmetic):
    """The normed layer's input is added to attn_delta, not the input itself."""

    def add_attention(self, states: torch.Tensor, delta: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return normed + delta


class ContextNotTransposed(Arithmetic):
    """Heads and tokens of the context stay as attention leaves them."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        context = super().attend(q, k, v, mask)
        heads = context.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        mixed: torch.Tensor = heads.reshape(context.shape)
        return mixed


class MoeResidualFromInput(Arithmetic):
    """The layer's input is added to moe_delta, not attn_residual."""

    def add_moe(self, residual: torch.Tensor, moe: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return states + moe


class PostNormOfInput(Arithmetic):
    """The experts' norm reads the layer's input."""

    def post_norm(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return super().post_norm(states, states)


# Of each: name, sites that are wrong although their inputs are right, class and its parameters. With `decodes`, it is
# also planted in decoded tokens alone.
PLANTS = (
    Plant("kv_repeat_tiled", _CONTEXT, Tiled, decodes=True),
    Plant("k_v_swapped", (Site.K_PROJ, Site.V_PROJ), KeysAndValuesSwapped),
    Plant("q_heads_interleaved", (Site.Q_PROJ,), QueryHeadsInterleaved),
    Plant("attention_scale", _CONTEXT, Scaled, {"factor": 0.8}, decodes=True),
    Plant("attention_scale", _CONTEXT, Scaled, {"factor": 2**0.5}),
    Plant("causal_mask_missing", _CONTEXT, CausalMaskMissing),
    Plant("padding_mask_missing", _CONTEXT, PaddingMaskMissing, needs_left_padding=True),
    Plant("attention_context_not_transposed", _CONTEXT, ContextNotTransposed),
    Plant("sliding_window", _CONTEXT, SlidingWindow, {"window": 24}, decodes=True),
    Plant("attention_softmax_low_precision", _CONTEXT, SoftmaxLowPrecision),
    Plant(
        "attention_heads_missing", (Site.ATTN_DELTA,), HeadsMissing, {"tp_degree": 2, "rank": 0}, decodes=True
    ),
    Plant("attention_heads_missing", (Site.ATTN_DELTA,), HeadsMissing, {"tp_degree": 4, "rank": 1}),
    Plant("o_proj_zero", (Site.ATTN_DELTA,), OutputProjectionZero),
    Plant("attention_delta_scaled", (Site.ATTN_DELTA,), DeltaScaled, {"factor": 2.0}, decodes=True),
    Plant("attention_residual_missing", (Site.ATTN_RESIDUAL,), AttentionResidualMissing, decodes=True),
    Plant("moe_residual_missing", (Site.OUTPUT,), MoeResidualMissing),
    Plant("residual_after_norm", (Site.ATTN_RESIDUAL,), ResidualAfterNorm),
    Plant("moe_residual_from_input", (Site.OUTPUT,), MoeResidualFromInput),
    Plant("post_norm_of_input", (Site.POST_NORM,), PostNormOfInput),
)
