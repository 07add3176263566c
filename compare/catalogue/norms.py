"""Mistakes of the norms: the two of the block, and those of queries and keys, over their whole width or each head."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType

import torch

from compare.catalogue import repairs
from compare.catalogue.candidates import Parameters, degrees, each, once_if, values_of
from compare.catalogue.mistake import Mistake
from minimax_tools.model import weight_names
from minimax_tools.model.graph import QkNorm
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import Change, Evaluation, LayerInputs, Stage
from minimax_tools.reference.float32_stages import (
    NORMS,
    norm_stage,
    normalise,
    rotate_halves,
    rotation_angles,
    split_heads,
)

# RMSNorm as a mistaken port computes it: from the layer, the states [...,F] and the weight [F] to the normed states.
_PortNorm = Callable[[Evaluation, torch.Tensor, torch.Tensor], torch.Tensor]

_BLOCK_NORMS = (Site.INPUT_NORM, Site.POST_NORM)
_QK_NORMS = (Site.Q_NORM, Site.K_NORM)
# Norms that may be wrong together, as parameters name them.
_NORMS_OF = MappingProxyType(
    {
        "all": (*_BLOCK_NORMS, *_QK_NORMS),
        "input_norm and post_norm": _BLOCK_NORMS,
        "q_norm and k_norm": _QK_NORMS,
        **{str(site): (site,) for site in (*_BLOCK_NORMS, *_QK_NORMS)},
    }
)
# Powers of two and their roots: a sum of squares that is reduced over the wrong number of ranks gives such a factor.
_FACTORS = (8**-0.5, 8**0.5, 4**-0.5, 2.0, 2**-0.5, 2**0.5, 0.25, 4.0, 0.125, 8.0)


def _replace(sites: tuple[Site, ...], norm: _PortNorm) -> Change:
    def stage(site: Site) -> Stage:
        source, weight_name = NORMS[site]

        def stage_of(layer: Evaluation) -> torch.Tensor:
            states, weight = layer[source], layer.gain(weight_name)
            if len(weight) == states.shape[-1]:
                return norm(layer, states, weight)
            # The weight is of one head, and each is normed alone.
            return norm(layer, states.unflatten(-1, (-1, len(weight))), weight).flatten(-2)

        return stage_of

    return Change(stages={site: stage(site) for site in sites})


def _rms_norm(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return normalise(states, weight, layer.spec.rms_norm_eps)


def _plus_one(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _rms_norm(layer, states, weight + 1.0)


def _minus_one(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _rms_norm(layer, states, weight - 1.0)


def _unweighted(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _rms_norm(layer, states, torch.ones_like(weight))


def _without_mean_square(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states * weight / math.sqrt(layer.spec.rms_norm_eps)


def _mean_subtracted(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _rms_norm(layer, states - states.mean(-1, keepdim=True), weight)


def _in_groups(num_groups: int) -> _PortNorm:
    def norm(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        groups = states.unflatten(-1, (num_groups, -1))
        return _rms_norm(layer, groups, weight.unflatten(0, (num_groups, -1))).flatten(-2)

    return norm


def _slice_twice(parts: int, part: int) -> _PortNorm:
    """Count one of `parts` slices of the channels twice in the sum of squares."""

    def norm(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        squares = states.square()
        total = squares.sum(-1, keepdim=True) + squares.chunk(parts, -1)[part].sum(-1, keepdim=True)
        return states * torch.rsqrt(total / states.shape[-1] + layer.spec.rms_norm_eps) * weight

    return norm


def _per_rank(tp_degree: int) -> _PortNorm:
    """Take the mean square of each rank's own channels alone."""

    def norm(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _in_groups(_num_slices(layer, weight, tp_degree))(layer, states, weight)

    return norm


def _first_slice(tp_degree: int) -> _PortNorm:
    """Multiply every rank's channels by rank 0's slice of the weight."""

    def norm(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_slices = _num_slices(layer, weight, tp_degree)
        return _rms_norm(layer, states, weight.chunk(num_slices)[0].repeat(num_slices))

    return norm


def _num_slices(layer: Evaluation, weight: torch.Tensor, tp_degree: int) -> int:
    """Count the different slices that ranks hold: with more ranks than heads, some ranks hold the same head."""
    return min(tp_degree, weight.numel() // layer.spec.head_dim)


def _weight_averaged(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads = weight.view(-1, layer.spec.head_dim)
    return _rms_norm(layer, states, heads.mean(0).repeat(len(heads)))


def _by_head_averaged(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Norm each head alone, with the weights averaged over heads."""
    heads = states.unflatten(-1, (-1, layer.spec.head_dim))
    return _rms_norm(layer, heads, weight.view(-1, layer.spec.head_dim).mean(0)).flatten(-2)


def _over_all_heads() -> Change:
    """Take one mean over all heads, with the weight of one head for each."""

    def stage(site: Site) -> Stage:
        source, weight_name = NORMS[site]

        def norm(layer: Evaluation) -> torch.Tensor:
            states, weight = layer[source], layer.gain(weight_name)
            return _rms_norm(layer, states, weight.repeat(states.shape[-1] // len(weight)))

        return norm

    return Change(stages={site: stage(site) for site in _QK_NORMS})


def _weights_exchanged() -> Change:
    weights = dict(zip(_QK_NORMS, (weight_names.K_NORM, weight_names.Q_NORM), strict=True))
    return Change(stages={site: norm_stage(NORMS[site][0], weight) for site, weight in weights.items()})


def _has_equal_norms(inputs: LayerInputs) -> bool:
    """Decide whether the norms of queries and keys have weights of one shape."""
    spec = inputs.spec
    return spec.graph.qk_norm is QkNorm.PER_HEAD or spec.num_key_value_heads == spec.num_attention_heads


def _weight_from_query_norm(heads: str) -> _PortNorm:
    """Take the key norm's weight from the query norm's: from the `first` heads, or from the first `of each group`."""

    def norm(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        taken = layer.gain(weight_names.Q_NORM)
        if heads == "of each group":
            groups = taken.unflatten(0, (layer.spec.num_key_value_heads, -1, layer.spec.head_dim))
            taken = groups[:, 0].flatten()
        return _rms_norm(layer, states, taken[: weight.numel()])

    return norm


def _query_norm_heads(inputs: LayerInputs) -> tuple[str, ...]:
    """List the ways to take as many heads as keys have; one if every key has one query."""
    spec = inputs.spec
    has_others = spec.graph.qk_norm is QkNorm.ALL_HEADS
    has_groups = has_others and 1 < spec.num_key_value_heads < spec.num_attention_heads
    return ("first", "of each group") if has_groups else ("first",)


def _scaled(factor: float) -> _PortNorm:
    return lambda layer, states, weight: _rms_norm(layer, states, weight * factor)


def _low_precision(layer: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rounded = states.bfloat16()
    mean = rounded.square().mean(-1, keepdim=True)
    return rounded.float() * torch.rsqrt(mean + layer.spec.rms_norm_eps).float() * weight


def _after_rope() -> Change:
    def stage(norm_site: Site) -> Stage:
        source, weight_name = NORMS[norm_site]

        def rotate_and_norm(layer: Evaluation) -> torch.Tensor:
            head_dim = layer.spec.head_dim
            rotated = rotate_halves(split_heads(layer[source], head_dim), rotation_angles(layer))
            flat = rotated.transpose(1, 2).flatten(2)
            return split_heads(_rms_norm(layer, flat, layer.gain(weight_name)), head_dim)

        return rotate_and_norm

    return Change(stages={Site.Q_ROPE: stage(Site.Q_NORM), Site.K_ROPE: stage(Site.K_NORM)})


def _tp_degrees(inputs: LayerInputs) -> tuple[int, ...]:
    """List degrees that split the kv heads evenly too, or leave at most one to a rank."""
    num_kv_heads = inputs.spec.num_key_value_heads
    return tuple(
        degree
        for degree in degrees(inputs.spec.num_attention_heads)
        if num_kv_heads % min(degree, num_kv_heads) == 0
    )


def _tell_heads(spec: ModelSpec, parameters: Parameters) -> str:
    is_each_head = parameters["tp_degree"] == spec.num_attention_heads
    return "Here there are as many parts as heads: each head is normed alone." if is_each_head else ""


def _other_eps(inputs: LayerInputs) -> tuple[Parameters, ...]:
    return tuple(
        {"norms": norms, "eps": eps}
        for norms in _NORMS_OF
        for eps in (1e-5, 1e-12, 1e-8, 1e-4, 1e-3, 1e-2)
        # Of some norms alone two to search from.
        if eps != inputs.spec.rms_norm_eps and (norms == "all" or eps in (1e-4, 1e-2))
    )


# `candidates`: parameters of `build` that are tried. `fitted`: the parameter that is also searched between them.
NORM_MISTAKES = (
    Mistake(
        name="input_norm_plus_one",
        build=lambda: _replace((Site.INPUT_NORM,), _plus_one),
        repair=repairs.subtract_one_from_input_norm,
    ),
    Mistake(
        name="post_norm_plus_one",
        build=lambda: _replace((Site.POST_NORM,), _plus_one),
        repair=repairs.subtract_one_from_post_norm,
    ),
    Mistake(
        name="norm_one_plus_missing",
        build=lambda norms: _replace(_NORMS_OF[norms], _minus_one),
        candidates=values_of("norms", *_NORMS_OF),
    ),
    Mistake(name="input_norm_weight_missing", build=lambda: _replace((Site.INPUT_NORM,), _unweighted)),
    Mistake(name="post_norm_weight_missing", build=lambda: _replace((Site.POST_NORM,), _unweighted)),
    Mistake(
        name="norm_eps",
        build=lambda norms, eps: _replace(
            _NORMS_OF[norms], lambda _, states, weight: normalise(states, weight, eps)
        ),
        candidates=_other_eps,
        fitted="eps",
        is_constant=True,
    ),
    Mistake(
        name="norm_mean_square_missing",
        build=lambda norms: _replace(_NORMS_OF[norms], _without_mean_square),
        candidates=each("norms", lambda _: _NORMS_OF),
    ),
    Mistake(name="norm_mean_subtracted", build=lambda: _replace(_BLOCK_NORMS, _mean_subtracted)),
    Mistake(
        name="norm_sum_partial",
        build=lambda groups: _replace(_BLOCK_NORMS, _in_groups(groups)),
        candidates=each(
            "groups", lambda inputs: (size for size in degrees(inputs.spec.hidden_size) if size <= 64)
        ),
    ),
    Mistake(
        name="post_norm_slice_twice",
        build=lambda parts, part: _replace((Site.POST_NORM,), _slice_twice(parts, part)),
        candidates=lambda inputs: tuple(
            {"parts": parts, "part": part}
            for parts in (2, 3, 4)
            if inputs.spec.hidden_size >= parts
            for part in range(parts)
        ),
    ),
    Mistake(name="qk_norm_missing", build=lambda: _replace(_QK_NORMS, lambda _, states, __: states)),
    Mistake(name="q_norm_missing", build=lambda: _replace((Site.Q_NORM,), lambda _, states, __: states)),
    Mistake(name="k_norm_missing", build=lambda: _replace((Site.K_NORM,), lambda _, states, __: states)),
    Mistake(
        name="qk_norm_per_rank",
        detail=_tell_heads,
        build=lambda tp_degree: _replace(_QK_NORMS, _per_rank(tp_degree)),
        candidates=each("tp_degree", _tp_degrees),
    ),
    Mistake(name="qk_norm_weight_averaged", build=lambda: _replace(_QK_NORMS, _weight_averaged)),
    Mistake(name="qk_norm_by_head_averaged", build=lambda: _replace(_QK_NORMS, _by_head_averaged)),
    Mistake(name="qk_norm_over_all_heads", build=_over_all_heads),
    Mistake(
        name="qk_norm_first_slice",
        build=lambda tp_degree: _replace(_QK_NORMS, _first_slice(tp_degree)),
        candidates=each("tp_degree", _tp_degrees),
    ),
    Mistake(
        name="k_norm_scaled",
        build=lambda factor: _replace((Site.K_NORM,), _scaled(factor)),
        candidates=each("factor", lambda _: _FACTORS),
        is_factor=True,
        fitted="factor",
        repair=repairs.divide_key_norm,
        takes_weight_for_gain=True,
    ),
    Mistake(
        name="k_norm_weight_of_q_norm",
        build=lambda heads: _replace((Site.K_NORM,), _weight_from_query_norm(heads)),
        candidates=each("heads", _query_norm_heads),
    ),
    Mistake(
        name="qk_norm_weights_exchanged",
        build=_weights_exchanged,
        candidates=once_if(_has_equal_norms),
        repair=repairs.exchange_query_and_key_norms,
    ),
    Mistake(
        name="q_norm_scaled",
        build=lambda factor: _replace((Site.Q_NORM,), _scaled(factor)),
        candidates=each("factor", lambda _: _FACTORS),
        is_factor=True,
        fitted="factor",
        repair=repairs.divide_query_norm,
        takes_weight_for_gain=True,
    ),
    Mistake(
        name="qk_norm_low_precision", build=lambda: _replace(_QK_NORMS, _low_precision), is_rounding=True
    ),
    Mistake(
        name="qk_norm_swapped_order",
        build=_after_rope,
        candidates=once_if(lambda inputs: inputs.spec.graph.has_qk_norm),
    ),
)
