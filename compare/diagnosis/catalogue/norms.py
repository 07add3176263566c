"""Mistakes of the norms: the two of the block, and those of queries and keys over their whole width.

B batch, S sequence, H hidden, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from compare.diagnosis.catalogue.splits import degrees
from compare.diagnosis.evaluation import Change, Evaluation, LayerInputs, Stage
from compare.diagnosis.mistake import Mistake, each, values_of
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import (
    NORMS,
    normalise,
    rotate_halves,
    rotation_angles,
    split_heads,
)

# From states and weight to the normed states.
_Norm = Callable[[Evaluation, torch.Tensor, torch.Tensor], torch.Tensor]

_BLOCK = (Site.INPUT_NORM, Site.POST_NORM)
_HEADS = (Site.Q_NORM, Site.K_NORM)


def _norms(norm: _Norm, *sites: Site) -> Change:
    return Change(stages={site: _stage(site, norm) for site in sites})


def _stage(site: Site, norm: _Norm) -> Stage:
    source, weight = NORMS[site]
    return lambda at: norm(at, at[source], at.weight(weight))


def _normed(at: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return normalise(states, weight, at.spec.rms_norm_eps)


def _plus_one(at: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _normed(at, states, weight + 1.0)


def _unweighted(at: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _normed(at, states, torch.ones_like(weight))


def _eps(eps: float) -> Change:
    return _norms(lambda _, states, weight: normalise(states, weight, eps), *_BLOCK, *_HEADS)


def _centred(at: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _normed(at, states - states.mean(-1, keepdim=True), weight)


def _in_parts(parts: int) -> _Norm:
    def norm(at: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        split = states.unflatten(-1, (parts, -1))
        return _normed(at, split, weight.unflatten(0, (parts, -1))).flatten(-2)

    return norm


def _slice_twice(parts: int, part: int) -> _Norm:
    def norm(at: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        squares = states.square()
        total = squares.sum(-1, keepdim=True) + squares.chunk(parts, -1)[part].sum(-1, keepdim=True)
        return states * torch.rsqrt(total / states.shape[-1] + at.spec.rms_norm_eps) * weight

    return norm


def _num_parts(at: Evaluation, weight: torch.Tensor, tp_degree: int) -> int:
    """Count the parts that heads are normed in: ranks that share a head hold the same part."""
    return min(tp_degree, weight.numel() // at.spec.head_dim)


def _per_rank(tp_degree: int) -> Change:
    return _norms(
        lambda at, states, weight: _in_parts(_num_parts(at, weight, tp_degree))(at, states, weight), *_HEADS
    )


def _averaged(at: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads = weight.view(-1, at.spec.head_dim)
    return _normed(at, states, heads.mean(0).repeat(len(heads)))


def _first_slice(tp_degree: int) -> Change:
    def norm(at: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        parts = _num_parts(at, weight, tp_degree)
        return _normed(at, states, weight.chunk(parts)[0].repeat(parts))

    return _norms(norm, *_HEADS)


def _scaled(factor: float, site: Site) -> Change:
    return _norms(lambda at, states, weight: _normed(at, states, weight * factor), site)


def _low_precision(at: Evaluation, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rounded = states.bfloat16()
    mean = rounded.square().mean(-1, keepdim=True)
    return rounded.float() * torch.rsqrt(mean + at.spec.rms_norm_eps).float() * weight


def _after_rope() -> Change:
    return Change(
        stages={
            Site.Q_ROPE: _normed_after_rope(*NORMS[Site.Q_NORM]),
            Site.K_ROPE: _normed_after_rope(*NORMS[Site.K_NORM]),
        }
    )


def _normed_after_rope(source: Site, name: str) -> Stage:
    def stage(at: Evaluation) -> torch.Tensor:
        head_dim = at.spec.head_dim
        rotated = rotate_halves(split_heads(at[source], head_dim), rotation_angles(at))
        flat = rotated.transpose(1, 2).flatten(2)
        return split_heads(_normed(at, flat, at.weight(name)), head_dim)

    return stage


def _tp_degrees(scene: LayerInputs) -> tuple[int, ...]:
    """List degrees that split the kv heads evenly too, or leave at most one to a rank."""
    num_kv_heads = scene.spec.num_key_value_heads
    return tuple(
        degree
        for degree in degrees(scene.spec.num_attention_heads)
        if num_kv_heads % min(degree, num_kv_heads) == 0
    )


def _width_parts(scene: LayerInputs) -> tuple[int, ...]:
    return tuple(degree for degree in degrees(scene.spec.hidden_size) if degree <= 64)


def _other_eps(scene: LayerInputs) -> tuple[float, ...]:
    candidates = (1e-5, 1e-12, 1e-8, 1e-4, 1e-3, 1e-2)
    return tuple(eps for eps in candidates if eps != scene.spec.rms_norm_eps)


_FACTORS = (8**-0.5, 8**0.5, 4**-0.5, 2.0, 2**-0.5, 2**0.5, 0.25, 4.0, 0.125, 8.0)

NORM_MISTAKES = (
    Mistake(
        name="input_norm_plus_one",
        what="The input norm multiplies by 1 + weight, as Gemma's does.",
        look_at="the input norm's class",
        build=lambda: _norms(_plus_one, Site.INPUT_NORM),
    ),
    Mistake(
        name="post_norm_plus_one",
        what="The norm before the experts multiplies by 1 + weight.",
        look_at="the post-attention norm's class",
        build=lambda: _norms(_plus_one, Site.POST_NORM),
    ),
    Mistake(
        name="input_norm_weight_missing",
        what="The input norm's weight is still one.",
        look_at="whether convert_state_dict binds input_layernorm.weight",
        build=lambda: _norms(_unweighted, Site.INPUT_NORM),
    ),
    Mistake(
        name="post_norm_weight_missing",
        what="The weight of the norm before the experts is still one.",
        look_at="whether convert_state_dict binds post_attention_layernorm.weight",
        build=lambda: _norms(_unweighted, Site.POST_NORM),
    ),
    Mistake(
        name="norm_eps",
        what="All norms use another epsilon than rms_norm_eps.",
        look_at="the default of the norms' eps",
        build=_eps,
        candidates=each("eps", _other_eps),
        fitted="eps",
    ),
    Mistake(
        name="norm_mean_subtracted",
        what="The block norms subtract the mean: LayerNorm, not RMSNorm.",
        look_at="the class of the block norms",
        build=lambda: _norms(_centred, *_BLOCK),
    ),
    Mistake(
        name="norm_sum_partial",
        what="The block norms take the mean square of a group of channels alone.",
        look_at="the all-reduce of the sum of squares, where channels are split",
        build=lambda groups: _norms(_in_parts(groups), *_BLOCK),
        candidates=each("groups", _width_parts),
    ),
    Mistake(
        name="post_norm_slice_twice",
        what="The norm before the experts counts a slice of the channels twice in its sum of squares.",
        look_at="the fused norm's loop over tiles",
        build=lambda parts, part: _norms(_slice_twice(parts, part), Site.POST_NORM),
        candidates=lambda scene: tuple(
            {"parts": parts, "part": part}
            for parts in (2, 3, 4)
            if scene.spec.hidden_size >= parts
            for part in range(parts)
        ),
        sources=("vllm#44692",),
    ),
    Mistake(
        name="qk_norm_missing",
        what="Queries and keys are not normed.",
        look_at="whether this path (a fused kernel, token generation) calls q_norm and k_norm",
        build=lambda: _norms(lambda _, states, __: states, *_HEADS),
        sources=("MiMo fork 428c446",),
    ),
    Mistake(
        name="qk_norm_per_rank",
        what="The q/k norms take the mean square of one rank's part of the width, with no all-reduce.",
        look_at="the all-reduce of the sum of squares in q_norm and k_norm",
        build=_per_rank,
        candidates=each("tp_degree", _tp_degrees),
        sources=("mlx-lm#898", "exllamav3#141", "exo#1318", "ATOM#613"),
    ),
    Mistake(
        name="qk_norm_weight_averaged",
        what="The q/k norm weights are averaged over heads and used for every head.",
        look_at="how the norm weights are reshaped to head_dim",
        build=lambda: _norms(_averaged, *_HEADS),
    ),
    Mistake(
        name="qk_norm_first_slice",
        what="Every rank norms with the weight slice of rank 0.",
        look_at="whether the rank is a constant in the traced graph",
        build=_first_slice,
        candidates=each("tp_degree", _tp_degrees),
    ),
    Mistake(
        name="k_norm_scaled",
        what="The key norm is off by a factor, such as 8**-0.5 where keys are replicated eight times.",
        look_at="the divisor of the all-reduced sum of squares in k_norm",
        build=lambda factor: _scaled(factor, Site.K_NORM),
        candidates=values_of("factor", *_FACTORS),
        fitted="factor",
    ),
    Mistake(
        name="q_norm_scaled",
        what="The query norm is off by a factor.",
        look_at="the divisor of the all-reduced sum of squares in q_norm",
        build=lambda factor: _scaled(factor, Site.Q_NORM),
        candidates=values_of("factor", *_FACTORS),
        fitted="factor",
    ),
    Mistake(
        name="qk_norm_low_precision",
        what="The q/k norms square and average in BF16.",
        look_at="the dtype of the squares and of the mean in q_norm and k_norm",
        build=lambda: _norms(_low_precision, *_HEADS),
        is_rounding=True,
        sources=("vllm#27627",),
    ),
    Mistake(
        name="qk_norm_swapped_order",
        what="Queries and keys are normed after they are rotated.",
        look_at="the order of q_norm and rotary embedding",
        build=_after_rope,
    ),
)
