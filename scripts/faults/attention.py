"""Mistakes of the norms, of the rotary embedding, of attention and o_proj, and of the residual stream.

A line has the name in the catalogue, the sites that are wrong although their inputs are right, the stages of
`Arithmetic` that are replaced, and the parameters. With `decodes` a mistake is also planted in decoded tokens alone: a
few are, because each takes a run more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic, Tap
from faults.plant import Plant, Stage, Tensor, in_tensors
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model.graph import QkNorm
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import (
    K_BIAS,
    K_NORM,
    K_PROJ,
    O_PROJ,
    Q_BIAS,
    Q_NORM,
    Q_PROJ,
    V_BIAS,
    V_PROJ,
)

_QK_NORM = (Site.Q_NORM, Site.K_NORM)  # computed by `head_norm`
_BLOCK_NORMS = (Site.INPUT_NORM, Site.POST_NORM)  # computed by `block_norm`
# Options of the models in which something is a mistake.
_PLAIN_GAINS, _ONE_PLUS_GAINS = ({"has_gain_of_one_plus": has_one} for has_one in (False, True))
_OVER_ALL_HEADS, _EACH_HEAD = {"qk_norm": QkNorm.ALL_HEADS}, {"qk_norm": QkNorm.PER_HEAD}
_ROPE, _CONTEXT, _DELTA = (Site.Q_ROPE, Site.K_ROPE), (Site.ATTN_CONTEXT,), (Site.ATTN_DELTA,)


def _unweighted(layer: Arithmetic, states: Tensor, weight: Tensor) -> Tensor:
    """Norm without a gain."""
    return layer.normalise(states, torch.full_like(weight, 0.0 if layer.graph.has_gain_of_one_plus else 1.0))


def _mean_subtracted(_: Stage, layer: Arithmetic, states: Tensor, weight: Tensor) -> Tensor:
    """Subtract the mean, as in LayerNorm."""
    exact = states.float()
    return layer.normalise(exact - exact.mean(-1, keepdim=True), weight).to(states.dtype)


def _norm_by_groups(layer: Arithmetic, states: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Norm each group of channels by its own mean square."""
    exact = states.float().unflatten(-1, (groups, -1))
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + layer.eps())
    return layer.weigh_norm(exact.flatten(-2), weight, states.dtype)


def _head_norm_per_rank(
    _: Stage, layer: Arithmetic, flat: Tensor, weight: Tensor, *, tp_degree: int
) -> Tensor:
    """Norm a rank's heads by their own mean square; kv heads fewer than ranks are copied, not divided."""
    is_key = flat.shape[-1] == layer.widths()[1]
    parts = min(tp_degree, layer.config.num_key_value_heads) if is_key else tp_degree
    return _norm_by_groups(layer, flat, weight, parts)


def _head_weights_averaged(tensors: LayerTensors, config: Any) -> None:
    """Give all heads the mean of their weights."""
    for name in (Q_NORM, K_NORM):
        heads = tensors[name].unflatten(0, (-1, config.head_dim))
        tensors[name] = heads.float().mean(0).to(heads.dtype).repeat(heads.shape[0])


def _head_norm_by_head_averaged(_: Stage, layer: Arithmetic, flat: Tensor, weight: Tensor) -> Tensor:
    """Norm a head by its own mean square, with the mean of all heads' weights."""
    head_dim = layer.config.head_dim
    shared = weight.unflatten(0, (-1, head_dim)).float().mean(0).to(weight.dtype)
    return layer.normalise(flat.unflatten(-1, (-1, head_dim)), shared).flatten(-2)


def _head_weights_exchanged(tensors: LayerTensors, _: Any) -> None:
    """Give the query norm the key norm's weight, and the key norm the query norm's."""
    tensors[Q_NORM], tensors[K_NORM] = tensors[K_NORM], tensors[Q_NORM]


def _slice_of_rank_0(tensors: LayerTensors, config: Any, *, tp_degree: int) -> None:
    """Use the weight slice of rank 0 on all ranks."""
    for name, heads in ((Q_NORM, config.num_attention_heads), (K_NORM, config.num_key_value_heads)):
        parts = min(tp_degree, heads)
        weight = tensors[name]
        tensors[name] = weight[: weight.shape[0] // parts].repeat(parts)


def _head_norm_low_precision(_: Stage, layer: Arithmetic, flat: Tensor, weight: Tensor) -> Tensor:
    """Compute squares and their mean in BF16."""
    parts = layer.norm_parts(flat, weight)
    mean = parts.bfloat16().pow(2).mean(-1, keepdim=True).float()
    return layer.weigh_norm(parts.float() * torch.rsqrt(mean + layer.eps()), weight, flat.dtype).view_as(flat)


def _weight_alone(
    _: Stage, __: Arithmetic, exact: Tensor, weight: Tensor, dtype: torch.dtype, **___: str
) -> Tensor:
    """Multiply by the weight, not by 1 + weight."""
    return weight * exact.to(dtype)


def _block_weight_alone(_: Stage, layer: Arithmetic, states: Tensor, weight: Tensor, **__: str) -> Tensor:
    """Multiply the block norms by the weight, not by 1 + weight."""
    return layer.normalise(states, weight.float() - 1)


def _over_all_heads(_: Stage, layer: Arithmetic, flat: Tensor, weight: Tensor) -> Tensor:
    """Take one mean over all heads, with the weight of one head for each."""
    return layer.normalise(flat, weight.repeat(flat.shape[-1] // weight.shape[-1]))


def _key_norm_of_query(_: Stage, layer: Arithmetic, flat: Tensor, *, heads: str) -> Tensor:
    """Take the query norm's weight: that of the first heads, or of the first head of each group."""
    weight = layer.weights.q_norm
    if heads == "of each group":
        weight = weight.view(-1, layer.config.head_dim)[:: layer.group_size()].flatten()
    return layer.head_norm(flat, weight[: flat.shape[-1]])


def _rotated_before_norm(
    _: Stage, layer: Arithmetic, q: Tensor, k: Tensor, positions: Tensor, tap: Tap
) -> tuple[Tensor, Tensor]:
    q, k = (layer.rotate(layer.heads(flat), positions).transpose(1, 2).flatten(2) for flat in (q, k))
    q, k = tap("q_norm", layer.q_norm(q)), tap("k_norm", layer.k_norm(k))
    return tap("q_rope", layer.heads(q)), tap("k_rope", layer.heads(k))


# All four sites are wrong: the norms do not follow from the projections, nor the rotations from the norms.
_SWAPPED_ORDER = (*_QK_NORM, *_ROPE)
_WRONG_EPS = {"eps": lambda _, __, *, eps: eps}
_BY_GROUPS = {
    "block_norm": lambda _, layer, states, weight, *, groups: _norm_by_groups(layer, states, weight, groups)
}

_NORMS = (
    # The weight is taken as a distance from one: as in other models, one is added to it.
    Plant(
        "input_norm_plus_one",
        (Site.INPUT_NORM,),
        {"input_norm": lambda _, layer, states: layer.normalise(states, layer.weights.input_norm + 1)},
        only_with=_PLAIN_GAINS,
    ),
    Plant(
        "post_norm_plus_one",
        (Site.POST_NORM,),
        {"post_norm": lambda _, layer, residual, __: layer.normalise(residual, layer.weights.post_norm + 1)},
        decodes=True,
        only_with=_PLAIN_GAINS,
    ),
    Plant(
        "norm_one_plus_missing",
        (*_BLOCK_NORMS, *_QK_NORM),
        {"weigh_norm": _weight_alone},
        {"norms": "all"},
        only_with=_ONE_PLUS_GAINS,
    ),
    Plant(
        "norm_one_plus_missing",
        _BLOCK_NORMS,
        {"block_norm": _block_weight_alone},
        {"norms": "input_norm and post_norm"},
        decodes=True,
        only_with=_ONE_PLUS_GAINS,
    ),
    Plant(
        "input_norm_weight_missing",
        (Site.INPUT_NORM,),
        {"input_norm": lambda _, layer, states: _unweighted(layer, states, layer.weights.input_norm)},
    ),
    Plant(
        "post_norm_weight_missing",
        (Site.POST_NORM,),
        {"post_norm": lambda _, layer, residual, __: _unweighted(layer, residual, layer.weights.post_norm)},
    ),
    Plant("norm_eps", (*_BLOCK_NORMS, *_QK_NORM), _WRONG_EPS, {"eps": 1e-2}),
    Plant("norm_eps", (*_BLOCK_NORMS, *_QK_NORM), _WRONG_EPS, {"eps": 1e-5}),
    Plant("norm_mean_subtracted", _BLOCK_NORMS, {"block_norm": _mean_subtracted}),
    # Channels are divided among ranks, and each rank norms its group by the mean square of this group.
    Plant("norm_sum_partial", _BLOCK_NORMS, _BY_GROUPS, {"groups": 2}),
    Plant("norm_sum_partial", _BLOCK_NORMS, _BY_GROUPS, {"groups": 4}),
    Plant(
        "qk_norm_missing",
        _QK_NORM,
        {"head_norm": lambda _, __, flat, ___: flat},
        decodes=True,
    ),
    Plant("q_norm_missing", (Site.Q_NORM,), {"q_norm": lambda _, __, flat: flat}),
    Plant("k_norm_missing", (Site.K_NORM,), {"k_norm": lambda _, __, flat: flat}),
    *(
        Plant(name, _QK_NORM, stages, parameters, only_with=_OVER_ALL_HEADS)
        for name, stages, parameters in (
            ("qk_norm_per_rank", {"head_norm": _head_norm_per_rank}, {"tp_degree": 2}),
            ("qk_norm_per_rank", {"head_norm": _head_norm_per_rank}, {"tp_degree": 8}),
            ("qk_norm_weight_averaged", {"edit": in_tensors(_head_weights_averaged)}, {}),
            ("qk_norm_by_head_averaged", {"head_norm": _head_norm_by_head_averaged}, {}),
            ("qk_norm_first_slice", {"edit": in_tensors(_slice_of_rank_0)}, {"tp_degree": 4}),
        )
    ),
    Plant("qk_norm_over_all_heads", _QK_NORM, {"head_norm": _over_all_heads}, only_with=_EACH_HEAD),
    Plant(
        "qk_norm_weights_exchanged",
        _QK_NORM,
        {"edit": in_tensors(_head_weights_exchanged)},
        only_with=_EACH_HEAD,
    ),
    # The mean square is divided by a wrong number of channels: the norm is off by a factor.
    Plant(
        "k_norm_scaled",
        (Site.K_NORM,),
        {"k_norm": lambda right, _, flat, *, factor: right(flat) * factor},
        {"factor": 8**-0.5},
        decodes=True,
    ),
    Plant(
        "k_norm_weight_of_q_norm",
        (Site.K_NORM,),
        {"k_norm": _key_norm_of_query},
        {"heads": "first"},
    ),
    Plant(
        "k_norm_weight_of_q_norm",
        (Site.K_NORM,),
        {"k_norm": _key_norm_of_query},
        {"heads": "of each group"},
        only_with=_OVER_ALL_HEADS,
    ),
    Plant(
        "q_norm_scaled",
        (Site.Q_NORM,),
        {"q_norm": lambda right, _, flat, *, factor: right(flat) * factor},
        {"factor": 2**-0.5},
    ),
    Plant("qk_norm_low_precision", _QK_NORM, {"head_norm": _head_norm_low_precision}),
    Plant(
        "qk_norm_swapped_order",
        _SWAPPED_ORDER,
        {"norm_and_rotate": _rotated_before_norm},
        only_with={"has_qk_norm": True},
    ),
)


def _interleaved(_: Stage, __: Arithmetic, part: Tensor, angles: Tensor) -> Tensor:
    """Pair neighbours instead of halves."""
    cos, sin = angles.cos().to(part.dtype), angles.sin().to(part.dtype)
    even, odd = part.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def _last_dims(_: Stage, layer: Arithmetic, heads: Tensor, positions: Tensor) -> Tensor:
    """Rotate the last dims of a head."""
    start = heads.shape[-1] - layer.rotary_width()
    return torch.cat((heads[..., :start], layer.turn(heads[..., start:], layer.angles(positions))), dim=-1)


def _low_precision_angles(_: Stage, layer: Arithmetic, positions: Tensor) -> Tensor:
    """Compute positions, frequencies and their product in BF16."""
    frequencies = layer.frequencies(positions.device).bfloat16()
    return (positions[:, None, :, None].bfloat16() * frequencies).float()


def _wrong_slice(right: Stage, layer: Arithmetic, heads: Tensor, positions: Tensor, *, period: int) -> Tensor:
    """Rotate the second slice of dims, if there is one, and the first in every `period`-th head alone."""
    width = layer.rotary_width()
    rotated: Tensor = right(heads, positions)
    if heads.shape[-1] < 2 * width:
        return rotated
    second = layer.turn(heads[..., width : 2 * width], layer.angles(positions))
    wrong = torch.cat((heads[..., :width], second, heads[..., 2 * width :]), dim=-1)
    numbers = torch.arange(heads.shape[1], device=heads.device)
    return torch.where((numbers % period == 0)[None, :, None, None], rotated, wrong)


def _early_at_edges(right: Stage, _: Arithmetic, positions: Tensor, *, size: int, of: str) -> Any:
    """Put the first token of each chunk at the position of the one before it, for queries and keys."""
    is_first = (positions % size == 0) & (positions > 0)
    return right(positions - is_first.long())


_MODULO = {"angles": lambda right, _, positions, *, modulo: right(positions % modulo)}
# The table of angles ends too early: its last entry stands for all later positions.
_CLAMPED = {"angles": lambda right, _, positions, *, last: right(positions.clamp(max=last))}
# Positions are in a dtype that cannot hold them, frequencies and products in float32.
_ROUNDED = {"angles": lambda right, _, positions, *, dtype: right(positions.to(getattr(torch, dtype)))}
_COUNTED = {
    "angles": lambda right, _, positions: right(
        torch.arange(positions.shape[1], device=positions.device)[None]
    )
}
_OTHER_WIDTH = {"rotary_width": lambda _, layer, *, rotary_dim: min(rotary_dim, layer.config.head_dim)}


def _other_theta(_: Stage, layer: Arithmetic, device: torch.device, *, theta: float) -> Tensor:
    width = layer.rotary_width()
    return layer.ladder(width, width, theta, device)


def _frequency_width(_: Stage, layer: Arithmetic, device: torch.device, *, width: int) -> Tensor:
    """Rotate the right width at frequencies of another width."""
    return layer.ladder(layer.rotary_width(), width, float(layer.config.rope_theta), device)


_ROTARY = (
    *(
        Plant(name, _ROPE, stages, parameters, needs_far_positions=True)
        for name, stages, parameters in (
            ("rope_positions_modulo", _MODULO, {"modulo": 128}),
            ("rope_positions_modulo", _MODULO, {"modulo": 4096}),
            ("rope_positions_clamped", _CLAMPED, {"last": 4095}),
            ("rope_positions_low_precision", _ROUNDED, {"dtype": "bfloat16"}),
            ("rope_positions_low_precision", _ROUNDED, {"dtype": "float16"}),
            ("rope_positions_counted", _COUNTED, {}),
        )
    ),
    # Numbers that no list has: the first wrong token tells them.
    Plant("rope_positions_modulo", _ROPE, _MODULO, {"modulo": 45}),
    Plant("rope_positions_clamped", _ROPE, _CLAMPED, {"last": 40}),
    Plant(
        "rope_positions_at_chunk_edges",
        _ROPE,
        {"angles": _early_at_edges},
        {"size": 16, "of": "queries and keys"},
    ),
    # Another width is rotated, at the frequencies of that width.
    Plant("rope_width", _ROPE, _OTHER_WIDTH, {"rotary_dim": 64}),
    Plant("rope_width", _ROPE, _OTHER_WIDTH, {"rotary_dim": 16}),
    Plant("rope_theta", _ROPE, {"frequencies": _other_theta}, {"theta": 1e4}, decodes=True),
    Plant("rope_interleaved", _ROPE, {"turn": _interleaved}, decodes=True),
    Plant("rope_missing", _ROPE, {"rotate": lambda _, __, heads, positions: heads}),
    Plant("rope_reversed", _ROPE, {"angles": lambda right, _, positions: -right(positions)}),
    Plant("rope_last_dims", _ROPE, {"rotate": _last_dims}),
    # Positions are stretched, as for a longer context.
    Plant(
        "rope_position_scaled",
        _ROPE,
        {"angles": lambda right, _, positions, *, factor: right(positions) * factor},
        {"factor": 0.25},
    ),
    Plant("rope_frequency_width", _ROPE, {"frequencies": _frequency_width}, {"width": 64}),
    Plant("rope_low_precision", _ROPE, {"angles": _low_precision_angles}),
    Plant("rope_wrong_slice", _ROPE, {"rotate": _wrong_slice}, {"period": 4}),
)


def _keys_and_values_swapped(tensors: LayerTensors, _: Any) -> None:
    """Cut the fused projection in the wrong order."""
    tensors[K_PROJ], tensors[V_PROJ] = tensors[V_PROJ], tensors[K_PROJ]
    if K_BIAS in tensors:
        tensors[K_BIAS], tensors[V_BIAS] = tensors[V_BIAS], tensors[K_BIAS]


def _query_heads_interleaved(tensors: LayerTensors, config: Any) -> None:
    """Take query heads, which lie kv group by kv group, as if the groups alternated."""
    for name in (Q_PROJ, Q_BIAS):
        if name in tensors:
            groups = tensors[name].unflatten(0, (config.num_key_value_heads, -1, config.head_dim))
            tensors[name] = groups.transpose(0, 1).flatten(0, 2).contiguous()


def _all_visible(_: Stage, __: Arithmetic, length: int, num_queries: int, device: torch.device) -> Tensor:
    return torch.ones((num_queries, length), dtype=torch.bool, device=device)


def _padding_visible(_: Stage, layer: Arithmetic, mask: Tensor, num_queries: int) -> Tensor:
    return layer.causal(mask.shape[1], num_queries, mask.device)[None, None]


def _not_transposed(right: Stage, layer: Arithmetic, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Leave heads and tokens of the context as attention leaves them."""
    context = right(q, k, v, mask)
    mixed: Tensor = context.unflatten(-1, (-1, layer.config.head_dim)).transpose(1, 2).reshape(context.shape)
    return mixed


def _windowed(right: Stage, _: Arithmetic, mask: Tensor, num_queries: int, *, window: int) -> Any:
    """Give a sliding window to a model that has none; distances count real tokens, not padding."""
    places = mask.cumsum(-1)
    distance = places[:, -num_queries:, None] - places[:, None, :]
    return right(mask, num_queries) & (distance < window)[:, None]


def _heads_of_rank(_: Stage, layer: Arithmetic, context: Tensor, *, tp_degree: int, rank: int) -> Tensor:
    """Let the heads of a single rank reach o_proj; the sum over ranks is missing."""
    width = context.shape[-1] // tp_degree
    part = slice(rank * width, (rank + 1) * width)
    return functional.linear(context[..., part], layer.weights.o_proj[:, part])


def _output_projection_zero(tensors: LayerTensors, _: Any) -> None:
    tensors[O_PROJ] = torch.zeros_like(tensors[O_PROJ])


_SCORES_SCALED = {"attention_scores": lambda right, _, q, k, *, factor: right(q, k) * factor}
_HEADS_OF_RANK = {"project_out": _heads_of_rank}

_ATTENTION = (
    Plant(
        "kv_repeat_tiled",
        _CONTEXT,
        {"repeat": lambda _, layer, heads: heads.repeat(1, layer.group_size(), 1, 1)},
        decodes=True,
    ),
    Plant(
        "qkv_bias_missing",
        (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ),
        {"qkv_bias": lambda right, _, **__: torch.zeros_like(right())},
        {"sites": "q_proj, k_proj and v_proj"},
        decodes=True,
        only_with={"has_qkv_bias": True},
    ),
    Plant("k_v_swapped", (Site.K_PROJ, Site.V_PROJ), {"edit": in_tensors(_keys_and_values_swapped)}),
    Plant("q_heads_interleaved", (Site.Q_PROJ,), {"edit": in_tensors(_query_heads_interleaved)}),
    Plant("attention_scale", _CONTEXT, _SCORES_SCALED, {"factor": 0.8}, decodes=True),
    Plant("attention_scale", _CONTEXT, _SCORES_SCALED, {"factor": 2**0.5}),
    Plant("causal_mask_missing", _CONTEXT, {"causal": _all_visible}),
    Plant("padding_mask_missing", _CONTEXT, {"visible": _padding_visible}, needs_left_padding=True),
    Plant("attention_context_not_transposed", _CONTEXT, {"attend": _not_transposed}),
    Plant("sliding_window", _CONTEXT, {"visible": _windowed}, {"window": 24}, decodes=True),
    Plant(
        "attention_softmax_low_precision",
        _CONTEXT,
        {"attention_weights": lambda _, __, scores: scores.bfloat16().softmax(-1).float()},
    ),
    Plant("attention_heads_missing", _DELTA, _HEADS_OF_RANK, {"tp_degree": 2, "rank": 0}, decodes=True),
    Plant("attention_heads_missing", _DELTA, _HEADS_OF_RANK, {"tp_degree": 4, "rank": 1}),
    Plant("o_proj_zero", _DELTA, {"edit": in_tensors(_output_projection_zero)}),
    # The output is reduced over the ranks more than once.
    Plant(
        "attention_delta_scaled",
        _DELTA,
        {"project_out": lambda right, _, context, *, factor: right(context) * factor},
        {"factor": 2.0},
        decodes=True,
    ),
    Plant(
        "attention_residual_missing",
        (Site.ATTN_RESIDUAL,),
        {"add_attention": lambda _, __, states, delta, normed: delta},
        decodes=True,
    ),
    Plant("moe_residual_missing", (Site.OUTPUT,), {"add_moe": lambda _, __, residual, moe, states: moe}),
    Plant(
        "residual_after_norm",
        (Site.ATTN_RESIDUAL,),
        {"add_attention": lambda _, __, states, delta, normed: normed + delta},
    ),
    Plant(
        "moe_residual_from_input",
        (Site.OUTPUT,),
        {"add_moe": lambda _, __, residual, moe, states: states + moe},
    ),
    Plant(
        "post_norm_of_input",
        (Site.POST_NORM,),
        {"post_norm": lambda right, _, residual, states: right(states, states)},
    ),
)

PLANTS = (*_NORMS, *_ROTARY, *_ATTENTION)
