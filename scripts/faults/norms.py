"""Mistakes of the four norms: each class overrides the stage of a right layer's `Arithmetic` that it gets wrong."""

from __future__ import annotations

import torch

from faults.arithmetic import Arithmetic, Tap
from faults.plant import Plant
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import K_NORM, Q_NORM

_QK_NORM = (Site.Q_NORM, Site.K_NORM)  # computed by `head_norm`
_BLOCK_NORMS = (Site.INPUT_NORM, Site.POST_NORM)  # computed by `block_norm`


class InputNormPlusOne(Arithmetic):
    """The weight is taken as a distance from one: as in other models, one is added to it."""

    def input_norm(self, states: torch.Tensor) -> torch.Tensor:
        return self.normalise(states, self.weights.input_norm + 1)


class PostNormPlusOne(Arithmetic):
    """The weight is taken as a distance from one: as in other models, one is added to it."""

    def post_norm(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self.normalise(residual, self.weights.post_norm + 1)


class InputNormWeightMissing(Arithmetic):
    """The weight stays at ones."""

    def input_norm(self, states: torch.Tensor) -> torch.Tensor:
        return self.normalise(states, torch.ones_like(self.weights.input_norm))


class PostNormWeightMissing(Arithmetic):
    """The weight stays at ones."""

    def post_norm(self, residual: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return self.normalise(residual, torch.ones_like(self.weights.post_norm))


class OtherEps(Arithmetic):
    """The epsilon of another model is used."""

    def eps(self) -> float:
        return self.number("eps")


class MeanSubtracted(Arithmetic):
    """The mean is subtracted, as in LayerNorm."""

    def block_norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.normalise(states.float() - states.float().mean(-1, keepdim=True), weight).to(states.dtype)


class SumPartial(Arithmetic):
    """Channels are divided among ranks, and each rank norms its group by the mean square of this group."""

    def block_norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ones = torch.ones((), dtype=weight.dtype, device=weight.device)
        return weight * self.normalise(states.unflatten(-1, (self.parameters.groups, -1)), ones).flatten(-2)


class HeadNormMissing(Arithmetic):
    """The norms of queries and keys are left out, as by a fused kernel."""

    def head_norm(self, flat: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return flat


class HeadNormPerRank(Arithmetic):
    """A rank norms its heads by their own mean square; kv heads fewer than ranks are copied, not divided."""

    def head_norm(self, flat: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        is_key = flat.shape[-1] == self.widths()[1]
        parts = int(self.parameters.tp_degree)
        if is_key:
            parts = min(parts, self.config.num_key_value_heads)
        ones = torch.ones((), dtype=weight.dtype, device=weight.device)
        return weight * self.normalise(flat.unflatten(-1, (parts, -1)), ones).flatten(-2)


class HeadNormAveraged(Arithmetic):
    """The mean of the heads' weights is used for all heads."""

    def edit(self, tensors: LayerTensors) -> None:
        for name in (Q_NORM, K_NORM):
            heads = tensors[name].unflatten(0, (-1, self.config.head_dim))
            tensors[name] = heads.float().mean(0).to(heads.dtype).repeat(heads.shape[0])


class HeadNormByHeadAveraged(Arithmetic):
    """A head's own mean square norms it, and all heads share one weight: the mean of theirs."""

    def head_norm(self, flat: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        head_dim = self.config.head_dim
        shared = weight.unflatten(0, (-1, head_dim)).float().mean(0).to(weight.dtype)
        return self.normalise(flat.unflatten(-1, (-1, head_dim)), shared).flatten(-2)


class HeadNormFirstSlice(Arithmetic):
    """The weight slice of rank 0 is used on all ranks."""

    def edit(self, tensors: LayerTensors) -> None:
        for name, heads in (
            (Q_NORM, self.config.num_attention_heads),
            (K_NORM, self.config.num_key_value_heads),
        ):
            parts = min(self.parameters.tp_degree, heads)
            weight = tensors[name]
            tensors[name] = weight[: weight.shape[0] // parts].repeat(parts)


class KeyNormScaled(Arithmetic):
    """The mean square of the keys is divided by a wrong number of channels: the norm is off by a factor."""

    def k_norm(self, flat: torch.Tensor) -> torch.Tensor:
        return super().k_norm(flat) * self.number("factor")


class QueryNormScaled(Arithmetic):
    """The mean square of the queries is divided by a wrong number of channels: the norm is off by a factor."""

    def q_norm(self, flat: torch.Tensor) -> torch.Tensor:
        return super().q_norm(flat) * self.number("factor")


class HeadNormLowPrecision(Arithmetic):
    """Squares and their mean are in BF16."""

    def head_norm(self, flat: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rough = flat.bfloat16()
        mean = rough.pow(2).mean(-1, keepdim=True).float()
        return weight * (flat.float() * torch.rsqrt(mean + self.eps())).to(flat.dtype)


class KeyNormOfQuery(Arithmetic):
    """The key norm got the query norm's weight: that of the first heads, or of the first head of each group."""

    def k_norm(self, flat: torch.Tensor) -> torch.Tensor:
        weight = self.weights.q_norm
        if self.parameters.heads == "of each group":
            weight = weight.view(-1, self.config.head_dim)[:: self.group_size()].flatten()
        return self.head_norm(flat, weight[: flat.shape[-1]])


class HeadNormAfterRotation(Arithmetic):
    """Queries and keys are rotated before the norm."""

    def norm_and_rotate(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, tap: Tap
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = (self.rotate(self.heads(flat), positions).transpose(1, 2).flatten(2) for flat in (q, k))
        q, k = tap("q_norm", self.q_norm(q)), tap("k_norm", self.k_norm(k))
        return tap("q_rope", self.heads(q)), tap("k_rope", self.heads(k))


# Name in the diagnosis, sites to blame, class, its parameters; `decodes`: planted in decoded tokens alone, too.
PLANTS = (
    Plant("input_norm_plus_one", (Site.INPUT_NORM,), InputNormPlusOne),
    Plant("post_norm_plus_one", (Site.POST_NORM,), PostNormPlusOne, decodes=True),
    Plant("input_norm_weight_missing", (Site.INPUT_NORM,), InputNormWeightMissing),
    Plant("post_norm_weight_missing", (Site.POST_NORM,), PostNormWeightMissing),
    Plant("norm_eps", (*_BLOCK_NORMS, *_QK_NORM), OtherEps, {"eps": 1e-2}),
    Plant("norm_eps", (*_BLOCK_NORMS, *_QK_NORM), OtherEps, {"eps": 1e-5}),
    Plant("norm_mean_subtracted", _BLOCK_NORMS, MeanSubtracted),
    Plant("norm_sum_partial", _BLOCK_NORMS, SumPartial, {"groups": 2}),
    Plant("norm_sum_partial", _BLOCK_NORMS, SumPartial, {"groups": 4}),
    Plant("qk_norm_missing", _QK_NORM, HeadNormMissing, decodes=True),
    Plant("qk_norm_per_rank", _QK_NORM, HeadNormPerRank, {"tp_degree": 2}),
    Plant("qk_norm_per_rank", _QK_NORM, HeadNormPerRank, {"tp_degree": 8}),
    Plant("qk_norm_weight_averaged", _QK_NORM, HeadNormAveraged),
    Plant("qk_norm_by_head_averaged", _QK_NORM, HeadNormByHeadAveraged),
    Plant("qk_norm_first_slice", _QK_NORM, HeadNormFirstSlice, {"tp_degree": 4}),
    Plant("k_norm_scaled", (Site.K_NORM,), KeyNormScaled, {"factor": 8**-0.5}, decodes=True),
    Plant("k_norm_weight_of_q_norm", (Site.K_NORM,), KeyNormOfQuery, {"heads": "first"}),
    Plant("k_norm_weight_of_q_norm", (Site.K_NORM,), KeyNormOfQuery, {"heads": "of each group"}),
    Plant("q_norm_scaled", (Site.Q_NORM,), QueryNormScaled, {"factor": 2**-0.5}),
    Plant("qk_norm_low_precision", _QK_NORM, HeadNormLowPrecision),
    # All four sites are wrong: the norms do not follow from the projections, nor the rotations from the norms.
    Plant("qk_norm_swapped_order", (*_QK_NORM, Site.Q_ROPE, Site.K_ROPE), HeadNormAfterRotation),
)
