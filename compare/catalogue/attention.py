"""Mistakes of attention, and of the residual stream around it.

B batch, S sequence, T judged tokens, F channels: sites are [B,S,F] before attn_context, from there on [T,F].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from compare.catalogue import repairs
from compare.catalogue.candidates import each, once_if, rank_of, share, values_of
from compare.catalogue.mistake import Mistake
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Change, Evaluation, LayerInputs, Stage, replace_stage, scaled
from minimax_tools.reference.float32_stages import PROJECTIONS, attend, normalise, product_stage


def _attend_with(**options: Any) -> Change:
    return replace_stage(Site.ATTN_CONTEXT, partial(attend, **options))


def _keys_and_values_swapped() -> Change:
    return Change(
        stages={
            Site.K_PROJ: product_stage(Site.INPUT_NORM, weight_names.V_PROJ),
            Site.V_PROJ: product_stage(Site.INPUT_NORM, weight_names.K_PROJ),
        }
    )


def _query_heads_interleaved(order: str) -> Change:
    """Exchange the two numbers of a query head: its kv group, and its place in the group.

    `by group` reads heads [group, place] as [place, group]; `by place` is the reverse.
    """

    def stage(layer: Evaluation) -> torch.Tensor:
        query = layer.base[Site.Q_PROJ]
        num_groups = layer.spec.num_key_value_heads
        group_size = layer.spec.num_attention_heads // num_groups
        num_outer = num_groups if order == "by group" else group_size
        heads = query.unflatten(-1, (num_outer, -1, layer.spec.head_dim))
        flat: torch.Tensor = heads.transpose(2, 3).flatten(2)
        return flat

    return replace_stage(Site.Q_PROJ, stage)


def _orders(inputs: LayerInputs) -> tuple[str, ...]:
    """List the orders of query heads; none with one group, or one head in each: there is nothing to exchange."""
    has_two = 1 < inputs.spec.num_key_value_heads < inputs.spec.num_attention_heads
    return ("by group", "by place") if has_two else ()


def _qkv_cut_per_group() -> Change:
    """Cut as [all Q | all K | all V] rows that lie per kv group as [its Q | its K | its V]."""
    sites = (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ)

    def cut(layer: Evaluation, *, place: int) -> torch.Tensor:
        spec = layer.spec
        parts = [layer.base[site].unflatten(-1, (spec.num_key_value_heads, -1)) for site in sites]
        rows = torch.cat(parts, dim=-1).flatten(2)
        widths = (spec.query_width, spec.key_value_width, spec.key_value_width)
        part: torch.Tensor = rows.split(widths, dim=-1)[place]
        return part

    return Change(stages={site: partial(cut, place=place) for place, site in enumerate(sites)})


def _heads_of_one_rank(tp_degree: int, rank: int) -> Change:
    def stage(layer: Evaluation) -> torch.Tensor:
        part = share(layer.spec.query_width, tp_degree, rank)
        return layer[Site.ATTN_CONTEXT][:, part] @ layer.weight(weight_names.O_PROJ)[:, part].T

    return replace_stage(Site.ATTN_DELTA, stage)


def _not_transposed(layer: Evaluation) -> torch.Tensor:
    """Flatten the context [B,N,S,D] as if it were [B,S,N,D]; a token that is decoded alone has nothing to transpose."""
    everywhere, spec, start = layer.base.everywhere(), layer.spec, layer.decode_start
    mask = everywhere.attention_mask
    # Padding too: its values end up at other tokens.
    right = everywhere[Site.ATTN_CONTEXT].unflatten(0, tuple(mask.shape))
    heads = right[:, :start].unflatten(-1, (spec.num_attention_heads, -1)).transpose(1, 2)
    mixed = torch.cat((heads.reshape(len(mask), start, -1), right[:, start:]), dim=1)
    return mixed.flatten(0, 1)[layer.places]


def _windows(inputs: LayerInputs) -> tuple[int, ...]:
    longest = int(inputs.attention_mask.sum(-1).max())
    sizes = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)
    return tuple(size for size in sizes if size < longest)


def _scales(inputs: LayerInputs) -> tuple[float, ...]:
    """List factors on the scores: not scaled at all, scaled twice, by rotary_dim for head_dim, and others."""
    head_dim, rotary_dim = inputs.spec.head_dim, inputs.spec.rotary_dim
    by_rotary_dim = (head_dim / rotary_dim) ** 0.5 if rotary_dim != head_dim else 2**0.5
    return (head_dim**0.5, head_dim**-0.5, by_rotary_dim, 2.0, 0.5, 0.9, 1.1, 2**-0.5, 4.0, 0.25)


def _post_norm_of_input(layer: Evaluation) -> torch.Tensor:
    weight = layer.gain(weight_names.POST_NORM)
    return normalise(layer.rows(Site.INPUT), weight, layer.spec.rms_norm_eps)


# `build` takes the parameters of a candidate. The one named by `fitted` (a whole number if `is_whole`) is then searched
# between the candidates. With `is_rounding` the error can be predicted only in part.
# Projections whose biases may be missing together, as parameters name them.
_BIASED = {
    "q_proj, k_proj and v_proj": (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ),
    **{str(site): (site,) for site in (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ)},
}


def _without_bias(sites: tuple[Site, ...]) -> Change:
    def stage(site: Site) -> Stage:
        source, weight = PROJECTIONS[site]
        return lambda layer: layer[source] @ layer.weight(weight).T

    return Change(stages={site: stage(site) for site in sites})


ATTENTION_MISTAKES = (
    Mistake(
        name="kv_repeat_tiled",
        build=lambda: _attend_with(is_tiled=True),
        candidates=once_if(lambda inputs: bool(_orders(inputs))),
    ),
    Mistake(
        name="qkv_bias_missing",
        build=lambda sites: _without_bias(_BIASED[sites]),
        candidates=values_of("sites", *_BIASED),
    ),
    Mistake(name="k_v_swapped", build=_keys_and_values_swapped, repair=repairs.exchange_keys_and_values),
    Mistake(
        name="q_heads_interleaved",
        build=_query_heads_interleaved,
        candidates=each("order", _orders),
        repair=repairs.reorder_query_heads,
    ),
    Mistake(
        name="qkv_cut_per_group",
        build=_qkv_cut_per_group,
        candidates=once_if(lambda inputs: inputs.spec.num_key_value_heads > 1),
        repair=repairs.spread_over_groups,
    ),
    Mistake(
        name="projection_scaled",
        build=lambda tensor, factor: scaled(Site(tensor), factor),
        candidates=lambda inputs: tuple(
            {"tensor": tensor, "factor": factor}
            for tensor in ("q_proj", "k_proj", "v_proj")
            for factor in (2.0, 0.5, 8.0, 0.125, 64.0, 1 / 64)
        ),
        is_factor=True,
        fitted="factor",
        repair=repairs.divide_projection,
    ),
    Mistake(
        name="attention_scale",
        build=lambda factor: _attend_with(scale=factor),
        candidates=each("factor", _scales),
        is_factor=True,
        fitted="factor",
    ),
    Mistake(name="causal_mask_missing", build=lambda: _attend_with(is_causal=False)),
    Mistake(
        name="padding_mask_missing",
        build=lambda: _attend_with(hides_padding=False),
        candidates=once_if(lambda inputs: not bool(inputs.attention_mask.all())),
    ),
    Mistake(
        name="sliding_window",
        build=lambda window: _attend_with(window=window),
        candidates=each("window", _windows),
        fitted="window",
        is_whole=True,
        is_constant=True,
    ),
    Mistake(
        name="attention_soft_cap",
        build=lambda cap: _attend_with(soft_cap=cap),
        candidates=values_of("cap", 50.0, 30.0, 20.0, 10.0, 5.0, 2.0, 1.0),
        fitted="cap",
        is_constant=True,
    ),
    Mistake(
        name="attention_context_not_transposed",
        build=lambda: replace_stage(Site.ATTN_CONTEXT, _not_transposed),
        reads_right_layer=True,
    ),
    Mistake(
        name="attention_softmax_low_precision",
        build=lambda: _attend_with(is_low_precision=True),
        is_rounding=True,
    ),
    Mistake(
        name="attention_heads_missing",
        build=_heads_of_one_rank,
        candidates=rank_of("tp_degree", "num_attention_heads"),
    ),
    Mistake(
        name="o_proj_zero",
        build=lambda: replace_stage(Site.ATTN_DELTA, lambda layer: torch.zeros_like(layer.rows(Site.INPUT))),
    ),
    Mistake(
        name="attention_delta_scaled",
        build=lambda factor: scaled(Site.ATTN_DELTA, factor),
        candidates=values_of("factor", 2.0, 4.0, 8.0, 0.5, 0.25, 0.125, 16.0, 32.0, 64.0, 0.9),
        is_factor=True,
        fitted="factor",
        repair=repairs.divide_output_projection,
    ),
    Mistake(
        name="attention_residual_missing",
        build=lambda: replace_stage(Site.ATTN_RESIDUAL, lambda layer: layer[Site.ATTN_DELTA]),
    ),
    Mistake(
        name="moe_residual_missing",
        build=lambda: replace_stage(Site.OUTPUT, lambda layer: layer[layer.graph.last_delta]),
    ),
    Mistake(
        name="residual_after_norm",
        build=lambda: replace_stage(
            Site.ATTN_RESIDUAL, lambda layer: layer.rows(Site.INPUT_NORM) + layer[Site.ATTN_DELTA]
        ),
    ),
    Mistake(
        name="moe_residual_from_input",
        build=lambda: replace_stage(
            Site.OUTPUT, lambda layer: layer.rows(Site.INPUT) + layer[layer.graph.last_delta]
        ),
    ),
    Mistake(name="post_norm_of_input", build=lambda: replace_stage(Site.POST_NORM, _post_norm_of_input)),
)
