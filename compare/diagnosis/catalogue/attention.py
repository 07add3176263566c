"""Mistakes of attention: how heads are cut, scores, masks, and which heads reach the output.

`layer[site]` is a value of the layer with the mistake, `layer.base[site]` that of the layer without it: [B,S,F] before
attn_context, from there on [T,F]. B batch, S sequence, T judged tokens, F channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from compare.diagnosis.catalogue import repairs
from compare.diagnosis.catalogue.splits import rank_of, share
from compare.diagnosis.evaluation import Change, Evaluation, LayerInputs, replace_stage, scaled
from compare.diagnosis.mistake import Mistake, each, once_if, values_of
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import attend, product_stage


def _attend_with(**options: Any) -> Change:
    """Compute attention with other options of `float32_stages.attend`."""
    return replace_stage(Site.ATTN_CONTEXT, partial(attend, **options))


def _keys_and_values_swapped() -> Change:
    """Compute k_proj with the weight of v_proj, and v_proj with that of k_proj."""
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
    """List windows that hide a key from some query."""
    longest = int(inputs.attention_mask.sum(-1).max())
    sizes = (8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)
    return tuple(size for size in sizes if size < longest)


def _scales(inputs: LayerInputs) -> tuple[float, ...]:
    """List factors on the scores: not scaled at all, scaled twice, by rotary_dim for head_dim, and others."""
    head_dim, rotary_dim = inputs.spec.head_dim, inputs.spec.rotary_dim
    by_rotary_dim = (head_dim / rotary_dim) ** 0.5 if rotary_dim != head_dim else 2**0.5
    return (head_dim**0.5, head_dim**-0.5, by_rotary_dim, 2.0, 0.5, 0.9, 1.1, 2**-0.5, 4.0, 0.25)


# `build` takes the parameters of a candidate. The one named by `fitted` (a whole number if `is_whole`) is then searched
# between the candidates. With `is_rounding` the error can be predicted only in part.
ATTENTION_MISTAKES = (
    Mistake(
        name="kv_repeat_tiled",
        what="Kv heads are tiled over the query heads, not repeated for neighbours.",
        look_at="repeat_kv: repeat_interleave, not repeat",
        build=lambda: _attend_with(is_tiled=True),
        candidates=once_if(lambda inputs: inputs.spec.num_key_value_heads > 1),
        sources=("onnx#7274", "axlearn#842"),
    ),
    Mistake(
        name="k_v_swapped",
        what="The rows of k_proj and v_proj are exchanged.",
        look_at="the order of q, k and v in a fused projection",
        build=_keys_and_values_swapped,
        repair=repairs.KEYS_AND_VALUES_EXCHANGED,
    ),
    Mistake(
        name="q_heads_interleaved",
        what="The rows of q_proj are cut with the heads of different kv groups interleaved.",
        look_at="how a fused projection is laid out per kv group, and how it is cut",
        build=_query_heads_interleaved,
        candidates=each("order", _orders),
        repair=repairs.QUERY_HEADS_REORDERED,
    ),
    Mistake(
        name="qkv_cut_per_group",
        what="The fused rows lie per kv group, and are cut as all queries, all keys, all values.",
        look_at="how a fused projection is laid out per kv group, and how it is cut",
        build=_qkv_cut_per_group,
        candidates=once_if(lambda inputs: inputs.spec.num_key_value_heads > 1),
        repair=repairs.ROWS_SPREAD_OVER_GROUPS,
    ),
    Mistake(
        name="projection_scaled",
        what="All of q_proj, k_proj or v_proj is off by a factor; behind q and k their norms hide it.",
        look_at="the scales of this tensor, and how a fused projection combines three of them",
        build=lambda tensor, factor: scaled(Site(tensor), factor),
        candidates=lambda inputs: tuple(
            {"tensor": tensor, "factor": factor}
            for tensor in ("q_proj", "k_proj", "v_proj")
            for factor in (2.0, 0.5, 8.0, 0.125, 64.0, 1 / 64)
        ),
        is_factor=True,
        fitted="factor",
        repair=repairs.PROJECTION_DIVIDED,
    ),
    Mistake(
        name="attention_scale",
        what="The scores are off by a factor from head_dim**-0.5.",
        look_at="the scale that attention, or the kernel, is given",
        build=lambda factor: _attend_with(scale=factor),
        candidates=each("factor", _scales),
        is_factor=True,
        fitted="factor",
    ),
    Mistake(
        name="causal_mask_missing",
        what="Tokens see those behind them.",
        look_at="the causal mask",
        build=lambda: _attend_with(is_causal=False),
    ),
    Mistake(
        name="padding_mask_missing",
        what="Tokens see padding before them.",
        look_at="whether the attention mask reaches the scores",
        build=lambda: _attend_with(hides_padding=False),
        candidates=once_if(lambda inputs: not bool(inputs.attention_mask.all())),
    ),
    Mistake(
        name="sliding_window",
        what="Tokens see the latest keys alone; MiniMax-M2 has no window.",
        look_at="a window or block size in attention, or in how the cache is written",
        build=lambda window: _attend_with(window=window),
        candidates=each("window", _windows),
        fitted="window",
        is_whole=True,
        is_constant=True,
    ),
    Mistake(
        name="attention_soft_cap",
        what="The scores are capped softly, cap · tanh(score / cap), as another model's are.",
        look_at="the soft cap that attention, or the kernel, is given",
        build=lambda cap: _attend_with(soft_cap=cap),
        candidates=values_of("cap", 50.0, 30.0, 20.0, 10.0, 5.0, 2.0, 1.0),
        fitted="cap",
        is_constant=True,
    ),
    Mistake(
        name="attention_context_not_transposed",
        what="The context's heads and tokens are not transposed before heads are laid side by side.",
        look_at="the transpose(1, 2) between attention and o_proj",
        build=lambda: replace_stage(Site.ATTN_CONTEXT, _not_transposed),
        reads_right_layer=True,
    ),
    Mistake(
        name="attention_softmax_low_precision",
        what="Scores and softmax are in BF16.",
        look_at="the dtype of the softmax",
        build=lambda: _attend_with(is_low_precision=True),
        is_rounding=True,
    ),
    Mistake(
        name="attention_heads_missing",
        what="Only one rank's heads reach the output.",
        look_at="the all-reduce behind o_proj",
        build=_heads_of_one_rank,
        candidates=rank_of("tp_degree", "num_attention_heads"),
        sources=("vllm-ascend#1856",),
    ),
)
