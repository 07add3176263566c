"""Mistakes of attention and rotary embedding compute what a port does that makes them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from compare.catalogue.candidates import Parameters
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.mistake import Mistake
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation

Expected = Callable[[Evaluation], torch.Tensor]


def find(name: str) -> Mistake:
    return CATALOGUE[name]


def attended(
    layer: Evaluation,
    *,
    kv_heads: tuple[int, ...] = (0, 0, 1, 1),
    scale: float = 1.0,
    sees: Callable[[int, int], bool] = lambda query, key: key <= query,
    sees_padding: bool = False,
) -> torch.Tensor:
    """The context, head by head and token by token."""
    values = layer[Site.V_PROJ].unflatten(-1, (2, 8))
    contexts = []
    for row, column in layer.attention_mask.nonzero().tolist():
        keys = [
            key
            for key in range(6)
            if sees(column, key) and (sees_padding or bool(layer.attention_mask[row, key]))
        ]
        heads = []
        for head, kv_head in enumerate(kv_heads):
            scores = layer[Site.K_ROPE][row, kv_head, keys] @ layer[Site.Q_ROPE][row, head, column]
            shares = (scores * scale / math.sqrt(8)).softmax(0)
            heads.append(shares @ values[row, keys, kv_head])
        contexts.append(torch.cat(heads))
    return torch.stack(contexts)


def turned(
    layer: Evaluation,
    angles: torch.Tensor,
    *,
    first: tuple[int, ...] = (0, 1),
    second: tuple[int, ...] = (2, 3),
    heads: tuple[int, ...] = (0, 1),
) -> torch.Tensor:
    """The keys, of which dims `first` turn with dims `second` by `angles` [B,S,F] in some heads."""
    right = layer[Site.K_NORM].unflatten(-1, (2, 8)).transpose(1, 2)
    result = right.clone()
    for head in heads:
        one, other = right[:, head][..., list(first)], right[:, head][..., list(second)]
        result[:, head, :, list(first)] = one * angles.cos() - other * angles.sin()
        result[:, head, :, list(second)] = other * angles.cos() + one * angles.sin()
    return result


def positions(layer: Evaluation) -> torch.Tensor:
    return layer.position_ids[..., None].float()


# Of base 100, over four dims.
FREQUENCIES = torch.tensor([1.0, 0.1])


def low(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def fused_by_group(layer: Evaluation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = (layer[site] for site in (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ))
    rows = torch.cat(
        (query[..., :16], key[..., :8], value[..., :8], query[..., 16:], key[..., 8:], value[..., 8:]), -1
    )
    return rows[..., :32], rows[..., 32:48], rows[..., 48:]


def heads_in(order: list[int]) -> Expected:
    return lambda layer: layer[Site.Q_PROJ].unflatten(-1, (4, 8))[..., order, :].flatten(-2)


CASES: list[tuple[str, Parameters, Site, Expected]] = [
    ("kv_repeat_tiled", {}, Site.ATTN_CONTEXT, lambda layer: attended(layer, kv_heads=(0, 1, 0, 1))),
    ("attention_scale", {"factor": 0.5}, Site.ATTN_CONTEXT, lambda layer: attended(layer, scale=0.5)),
    (
        "causal_mask_missing",
        {},
        Site.ATTN_CONTEXT,
        lambda layer: attended(layer, sees=lambda query, key: True),
    ),
    ("padding_mask_missing", {}, Site.ATTN_CONTEXT, lambda layer: attended(layer, sees_padding=True)),
    (
        "sliding_window",
        {"window": 2},
        Site.ATTN_CONTEXT,
        lambda layer: attended(layer, sees=lambda query, key: query - 2 < key <= query),
    ),
    (
        "k_v_swapped",
        {},
        Site.K_PROJ,
        lambda layer: layer[Site.INPUT_NORM] @ layer.weight(weight_names.V_PROJ).T,
    ),
    (
        "k_v_swapped",
        {},
        Site.V_PROJ,
        lambda layer: layer[Site.INPUT_NORM] @ layer.weight(weight_names.K_PROJ).T,
    ),
    ("qkv_cut_per_group", {}, Site.Q_PROJ, lambda layer: fused_by_group(layer)[0]),
    ("qkv_cut_per_group", {}, Site.K_PROJ, lambda layer: fused_by_group(layer)[1]),
    ("qkv_cut_per_group", {}, Site.V_PROJ, lambda layer: fused_by_group(layer)[2]),
    ("q_heads_interleaved", {"order": "by group"}, Site.Q_PROJ, heads_in([0, 2, 1, 3])),
    (
        "projection_scaled",
        {"tensor": "v_proj", "factor": 8.0},
        Site.V_PROJ,
        lambda layer: 8 * layer[Site.INPUT_NORM] @ layer.weight(weight_names.V_PROJ).T,
    ),
    (
        "attention_heads_missing",
        {"tp_degree": 2, "rank": 1},
        Site.ATTN_DELTA,
        lambda layer: layer[Site.ATTN_CONTEXT][:, 16:] @ layer.weight(weight_names.O_PROJ)[:, 16:].T,
    ),
    ("rope_missing", {}, Site.K_ROPE, lambda layer: turned(layer, 0 * positions(layer))),
    ("rope_reversed", {}, Site.K_ROPE, lambda layer: turned(layer, -positions(layer) * FREQUENCIES)),
    (
        "rope_position_scaled",
        {"factor": 4.0},
        Site.K_ROPE,
        lambda layer: turned(layer, 4 * positions(layer) * FREQUENCIES),
    ),
    (
        "rope_interleaved",
        {},
        Site.K_ROPE,
        lambda layer: turned(layer, positions(layer) * FREQUENCIES, first=(0, 2), second=(1, 3)),
    ),
    (
        "rope_last_dims",
        {},
        Site.K_ROPE,
        lambda layer: turned(layer, positions(layer) * FREQUENCIES, first=(4, 5), second=(6, 7)),
    ),
    (
        "rope_theta",
        {"theta": 1e4},
        Site.K_ROPE,
        lambda layer: turned(layer, positions(layer) * torch.tensor([1.0, 0.01])),
    ),
    (
        "rope_width",
        {"rotary_dim": 2},
        Site.K_ROPE,
        lambda layer: turned(layer, positions(layer), first=(0,), second=(1,)),
    ),
    (
        "rope_frequency_width",
        {"width": 8},
        Site.K_ROPE,
        lambda layer: turned(layer, positions(layer) * torch.tensor([1.0, 0.1**0.5])),
    ),
    *(
        ("rope_low_precision", {"rounded": rounded}, Site.K_ROPE, expected)
        for rounded, expected in (
            ("angles", lambda layer: turned(layer, low(positions(layer) * FREQUENCIES))),
            ("frequencies", lambda layer: turned(layer, positions(layer) * low(FREQUENCIES))),
            ("all", lambda layer: turned(layer, low(low(positions(layer)) * low(FREQUENCIES)))),
        )
    ),
    (
        "rope_positions_modulo",
        {"modulo": 3},
        Site.K_ROPE,
        lambda layer: turned(layer, positions(layer) % 3 * FREQUENCIES),
    ),
    (
        "rope_positions_clamped",
        {"last": 2},
        Site.K_ROPE,
        lambda layer: turned(layer, positions(layer).clamp(max=2) * FREQUENCIES),
    ),
    (
        "rope_positions_counted",
        {},
        Site.K_ROPE,
        lambda layer: turned(layer, torch.arange(6.0).expand(2, 6)[..., None] * FREQUENCIES),
    ),
    (
        "rope_positions_at_chunk_edges",
        {"size": 3, "of": "queries and keys", "counted": "columns"},
        Site.K_ROPE,
        lambda layer: turned(
            layer, (positions(layer) - torch.tensor([0, 0, 0, 1, 0, 0])[:, None]) * FREQUENCIES
        ),
    ),
]


@pytest.mark.parametrize(("name", "parameters", "site", "expected"), CASES)
def test_changed_site_is_what_the_port_computes(
    layer: Evaluation, name: str, parameters: Parameters, site: Site, expected: Expected
) -> None:
    change = find(name).build(**parameters)
    # The stage alone, on right values: mistakes of several sites would change its input too.
    found = change.stages[site](layer)
    torch.testing.assert_close(found, expected(layer))
    assert not torch.equal(found, layer[site])
    if site is Site.K_ROPE:
        assert change.stages.keys() == {Site.Q_ROPE, Site.K_ROPE}


def test_dims_behind_are_rotated_in_all_heads_but_one_of_a_period(layer: Evaluation) -> None:
    found = find("rope_wrong_slice").build(period=2).stages[Site.K_ROPE](layer)
    angles = positions(layer) * FREQUENCIES
    torch.testing.assert_close(found[:, 0], turned(layer, angles)[:, 0])
    torch.testing.assert_close(found[:, 1], turned(layer, angles, first=(4, 5), second=(6, 7))[:, 1])


def test_rotation_before_the_norm_norms_what_was_rotated(layer: Evaluation) -> None:
    found = find("qk_norm_swapped_order").build().stages[Site.K_ROPE](layer)
    flat = layer[Site.K_PROJ]
    norm = (flat.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    # A rotation leaves the mean square as it is.
    weight = layer.weight(weight_names.K_NORM).view(2, 8)
    projected = flat.unflatten(-1, (2, 8)).transpose(1, 2)
    angles = positions(layer) * FREQUENCIES
    expected = projected.clone()
    one, other = projected[..., :2], projected[..., 2:4]
    cos, sin = angles[:, None].cos(), angles[:, None].sin()
    expected[..., :2], expected[..., 2:4] = one * cos - other * sin, other * cos + one * sin
    torch.testing.assert_close(found, expected / norm[:, None] * weight[None, :, None])
