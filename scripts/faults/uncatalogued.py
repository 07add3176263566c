"""Mistakes that the diagnosis has no name for, but mm2 must find; numbers in them are arbitrary.

B prompts, S tokens of each, T tokens of all. `moe` is [B,S,hidden], router logits and scores are [T,experts], and the
chosen experts and their weights [T,k].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic, Tap
from faults.experts import plain_swiglu
from faults.plant import Kind, Plant, Stage, State, Tensor, in_fused, in_tensors
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import K_PROJ, O_PROJ, Q_PROJ

_ROPE, _CONTEXT, _DELTA = (Site.Q_ROPE, Site.K_ROPE), (Site.ATTN_CONTEXT,), (Site.ATTN_DELTA,)
_EXPERTS, _ROUTED, _MOE = (Site.ROUTER_EXPERTS,), (Site.ROUTED_DELTA,), (Site.MOE_DELTA,)


def _head_zero(tensors: LayerTensors, config: Any) -> None:
    """Leave the queries of one head unloaded."""
    weight, width = tensors[Q_PROJ].clone(), config.head_dim
    weight[5 * width : 6 * width] = 0
    tensors[Q_PROJ] = weight


def _output_head_zero(tensors: LayerTensors, config: Any) -> None:
    """Leave the columns of o_proj of one head unloaded."""
    weight, width = tensors[O_PROJ].clone(), config.head_dim
    weight[:, 5 * width : 6 * width] = 0
    tensors[O_PROJ] = weight


def _saturating(right: Stage, _: Arithmetic, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Saturate a cast at three standard deviations of a token's values."""
    context = right(q, k, v, mask)
    limit = 3 * context.float().std(-1, keepdim=True).to(context.dtype)
    return torch.minimum(torch.maximum(context, -limit), limit)


def _tile_twice(right: Stage, layer: Arithmetic, context: Tensor) -> Any:
    """Add a tile of o_proj's inner dim twice."""
    tile = slice(128, 256)
    return right(context) + functional.linear(context[..., tile], layer.weights.o_proj[:, tile])


def _keys_quantised(
    right: Stage, _: Arithmetic, q: Tensor, k: Tensor, positions: Tensor, tap: Tap
) -> tuple[Tensor, Tensor]:
    """Cache rotated keys in FP8 where nobody asked for it."""

    def rounding(site: str, value: Tensor) -> Tensor:
        is_cached = site == "k_rope"
        return tap(site, value.float().to(torch.float8_e4m3fn).to(value.dtype) if is_cached else value)

    rotated: tuple[Tensor, Tensor] = right(q, k, positions, rounding)
    return rotated


def _value_halves_swapped(right: Stage, layer: Arithmetic, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange the halves of every value head."""
    q, k, v = right(normed)
    return q, k, v.unflatten(-1, (-1, 2, layer.config.head_dim // 2)).flip(-2).flatten(-3)


def _oldest_forgotten(right: Stage, _: Arithmetic, mask: Tensor, num_queries: int) -> Any:
    """Hide the first token of a prompt, which was overwritten in the cache, from later passes."""
    is_first = (mask.cumsum(-1) == 1) & mask.bool()  # [B, past and present tokens]
    is_query = torch.zeros_like(is_first)
    is_query[:, -num_queries:] = True
    # A pass that holds the first token still sees it: only a later pass reads it from the cache.
    is_gone = is_first & ~is_query
    return right(mask, num_queries) & ~is_gone[:, None, None, :]


def _channels_rolled(tensors: LayerTensors, _: Any) -> None:
    """Put the last quarter of o_proj's rows one row off."""
    weight = tensors[O_PROJ]
    start = weight.shape[0] * 3 // 4
    tensors[O_PROJ] = torch.cat((weight[:start], weight[start:].roll(1, dims=0)))


def _keys_slightly_large(tensors: LayerTensors, _: Any) -> None:
    """Make the weights of the keys larger by one step of BF16."""
    tensors[K_PROJ] = tensors[K_PROJ] * (1 + 2**-7)


def _residual_garbage(_: Stage, __: Arithmetic, states: Tensor, delta: Tensor, normed: Tensor) -> Tensor:
    """Add garbage in memory to the residual."""
    garbage = torch.linspace(0, 97, states.shape[-1], device=states.device).sin()
    return states + delta + (0.5 * delta.float().std() * garbage).to(states.dtype)


def _buffer_not_cleared(_: Stage, __: Arithmetic, moe: Tensor, mask: Tensor) -> Tensor:
    """Add to the last channels of moe_delta those of the prompt before it in the batch."""
    is_stale = torch.arange(moe.shape[-1], device=moe.device) >= moe.shape[-1] - 32
    before = torch.cat((torch.zeros_like(moe[:1]), moe[:-1]), dim=0)
    return moe + before * is_stale.to(moe.dtype)


def _bucket_end_wrong(_: Stage, __: Arithmetic, moe: Tensor, mask: Tensor) -> Tensor:
    """Give the last token of every bucket of 64 what the token before it got."""
    is_last = torch.arange(moe.shape[1], device=moe.device) % 64 == 63
    return torch.where(is_last[:, None], moe.roll(1, dims=1), moe)


def _gather_off_by_one(state: State) -> None:
    """Let the last expert alone compute with the weights of the one before it."""
    for name in ("gate_up", "down"):
        state[name][-1] = state[name][-2]


def _sum_counts_twice(_: Stage, layer: Arithmetic, residual: Tensor, states: Tensor) -> Tensor:
    """Count a quarter of the channels twice in the mean square of post_norm."""
    exact = residual.float()
    quarter = exact.shape[-1] // 4
    squares = exact.pow(2).sum(-1, keepdim=True)
    squares = squares + exact[..., quarter : 2 * quarter].pow(2).sum(-1, keepdim=True)
    normed = exact * torch.rsqrt(squares / exact.shape[-1] + layer.eps())
    return layer.weigh_norm(normed, layer.weights.post_norm, residual.dtype)


def _later_rows_differ(_: Stage, __: Arithmetic, moe: Tensor, mask: Tensor) -> Tensor:
    """Let a kernel's result depend on the place in the batch: all prompts but the first are 5 % too large."""
    factors = torch.ones(moe.shape[0], dtype=moe.dtype, device=moe.device)
    factors = torch.where(torch.arange(moe.shape[0], device=moe.device) > 0, 1.05 * factors, factors)
    return moe * factors[:, None, None].to(moe.dtype)


def _last_experts_never_chosen(right: Stage, _: Arithmetic, biased: Tensor) -> Any:
    """Leave the last two experts out of the search for the best."""
    numbers = torch.arange(biased.shape[-1], device=biased.device)
    return right(torch.where(numbers < biased.shape[-1] - 2, biased, -1e4))


def _experts_of_token_before(right: Stage, _: Arithmetic, scores: Tensor) -> Tensor:
    """Give a token in sixteen the experts of the token before."""
    experts = right(scores)
    is_late = torch.arange(experts.shape[0], device=experts.device) % 16 == 15
    return torch.where(is_late[:, None], experts.roll(1, dims=0), experts)


def _expert_negated(state: State) -> None:
    state["down"][3] = -state["down"][3]


def _remainder_dropped(right: Stage, _: Arithmetic, tokens: Tensor, slab: slice) -> Any:
    """Leave out the last channels of the experts' width, less than a tile."""
    inner = right(tokens, slab)
    is_whole = torch.arange(inner.shape[-1], device=inner.device) < inner.shape[-1] - 8
    return inner * is_whole.to(inner.dtype)


def _constant_added(_: Stage, __: Arithmetic, moe: Tensor, mask: Tensor) -> Tensor:
    """Add a constant to each channel."""
    constant = torch.linspace(0, 41, moe.shape[-1], device=moe.device).cos()
    return moe + (0.1 * moe.float().std() * constant).to(moe.dtype)


def _inf_in_one_token(_: Stage, __: Arithmetic, moe: Tensor, mask: Tensor) -> Tensor:
    """Let one value of one token of each prompt overflow: a corrupted payload."""
    positions = torch.arange(moe.shape[1], device=moe.device)[:, None]
    channels = torch.arange(moe.shape[2], device=moe.device)
    is_hit = (positions == moe.shape[1] // 2) & (channels == 5)
    return torch.where(is_hit, torch.inf, moe)


def _quarter_reduced_twice(_: Stage, __: Arithmetic, residual: Tensor, moe: Tensor, states: Tensor) -> Tensor:
    """Add the sum of the experts a second time in one quarter of the channels."""
    quarter = torch.arange(moe.shape[-1], device=moe.device) < moe.shape[-1] // 4
    return residual + moe + moe * quarter.to(moe.dtype)


# The last query head reads the first kv head.
_LAST_READS_FIRST = {"repeat": lambda right, _, heads: torch.cat((right(heads)[:, :-1], heads[:, :1]), dim=1)}
# Scores are capped, as another model's are.
_CAPPED = {"attention_scores": lambda right, _, q, k: 2 * torch.tanh(right(q, k) / 2)}
# Pairs of logits change places, as where the halves of a word are read in the wrong order.
_PAIRS_SWAPPED = {
    "logits": lambda right, _, tokens: right(tokens).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
}

_plant = partial(Plant, kind=Kind.UNCATALOGUED)
# `decodes`: planted in decoded tokens alone too; `prefills=False`: only there. `akin`: mistakes of the catalogue that
# compute nearly the same, whose names are right answers too.
PLANTS = (
    _plant("head_zero", (Site.Q_PROJ,), {"edit": in_tensors(_head_zero)}),
    _plant("output_head_zero", _DELTA, {"edit": in_tensors(_output_head_zero)}),
    _plant("saturating_cast", _CONTEXT, {"attend": _saturating}),
    _plant("tile_twice", _DELTA, {"project_out": _tile_twice}, decodes=True),
    _plant("keys_quantised", (Site.K_ROPE,), {"norm_and_rotate": _keys_quantised}, decodes=True),
    _plant("value_halves_swapped", (Site.V_PROJ,), {"project": _value_halves_swapped}, decodes=True),
    _plant("last_head_reads_first", _CONTEXT, _LAST_READS_FIRST, decodes=True),
    _plant("scores_capped", _CONTEXT, _CAPPED, akin=("attention_soft_cap",)),
    _plant("oldest_forgotten", _CONTEXT, {"visible": _oldest_forgotten}, prefills=False, decodes=True),
    # A pass counts its own positions one too high.
    _plant("step_ahead", _ROPE, {"angles": lambda right, _, positions: right(positions + 1)}, decodes=True),
    _plant("channels_rolled", _DELTA, {"edit": in_tensors(_channels_rolled)}),
    _plant("keys_slightly_large", (Site.K_PROJ,), {"edit": in_tensors(_keys_slightly_large)}),
    _plant("residual_garbage", (Site.ATTN_RESIDUAL,), {"add_attention": _residual_garbage}),
    _plant("buffer_not_cleared", _MOE, {"finish_moe": _buffer_not_cleared}),
    _plant("bucket_end_wrong", _MOE, {"finish_moe": _bucket_end_wrong}),
    _plant("gather_off_by_one", _ROUTED, {"fuse": in_fused(_gather_off_by_one)}),
    _plant(
        "sum_counts_twice",
        (Site.POST_NORM,),
        {"post_norm": _sum_counts_twice},
        decodes=True,
        akin=("post_norm_slice_twice",),
    ),
    _plant("later_rows_differ", _MOE, {"finish_moe": _later_rows_differ}, decodes=True),
    _plant("last_experts_never_chosen", _EXPERTS, {"best": _last_experts_never_chosen}),
    _plant("experts_of_token_before", _EXPERTS, {"choose": _experts_of_token_before}),
    # The weights are sorted the other way than the experts.
    _plant(
        "weights_reversed",
        (Site.ROUTER_WEIGHTS,),
        {"balance": lambda right, _, chosen: right(chosen).flip(-1)},
        decodes=True,
    ),
    _plant("expert_negated", _ROUTED, {"fuse": in_fused(_expert_negated)}),
    _plant("remainder_dropped", _ROUTED, {"activated": _remainder_dropped}),
    # The experts' sum, which is BF16, is too small by one step of BF16 in each value.
    _plant(
        "moe_slightly_small",
        _MOE,
        {"finish_moe": lambda _, __, moe, mask: moe * (1 - 2**-8)},
        akin=("moe_delta_scaled", "router_weights_scaled"),
    ),
    # The kernel of both the routed and the shared experts computes another activation.
    _plant(
        "swiglu_plain_everywhere",
        (Site.ROUTED_DELTA, Site.SHARED_DELTA),
        {"combine": plain_swiglu},
        akin=("swiglu_plain",),
        only_with={"has_swiglu_oai": True},
    ),
    _plant("constant_added", _MOE, {"finish_moe": _constant_added}),
    _plant("logit_pairs_swapped", (Site.ROUTER_LOGITS,), _PAIRS_SWAPPED),
    _plant("inf_in_one_token", _MOE, {"finish_moe": _inf_in_one_token}),
    _plant("quarter_reduced_twice", (Site.OUTPUT,), {"add_moe": _quarter_reduced_twice}),
)
