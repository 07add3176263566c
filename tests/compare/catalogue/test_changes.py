"""Mistakes of norms, router, experts and residuals compute what a port does that makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch.nn import functional

from compare.catalogue.candidates import Parameters
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.low_bits import fp8_blocks, fp8_groups, integer_groups, offset_groups
from compare.catalogue.mistake import Mistake
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation, ExpertValue

Expected = Callable[[Evaluation], torch.Tensor]
EPS = 1e-2


def find(name: str) -> Mistake:
    return CATALOGUE[name]


def rms(states: torch.Tensor) -> torch.Tensor:
    return (states.square().mean(-1, keepdim=True) + EPS).sqrt()


def normed(site: Site, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Expected:
    """The norm of a site with an edited weight."""
    return lambda layer: layer[site] / rms(layer[site]) * edit(layer.weight(name))


def scores(layer: Evaluation) -> torch.Tensor:
    return layer[Site.ROUTER_LOGITS].sigmoid()


def bias(layer: Evaluation) -> torch.Tensor:
    return layer.weight(weight_names.CORRECTION_BIAS)


def best(choice: Expected, k: int = 3) -> Expected:
    return lambda layer: choice(layer).topk(k).indices


def chosen(layer: Evaluation, values: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, layer[Site.ROUTER_EXPERTS])


def whole(shares: torch.Tensor) -> torch.Tensor:
    return shares / shares.sum(-1, keepdim=True)


def low(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def renumbered(edit: Callable[[torch.Tensor], torch.Tensor]) -> Expected:
    return lambda layer: edit(layer[Site.ROUTER_EXPERTS])


def summed(keeps: Callable[[torch.Tensor], torch.Tensor]) -> Expected:
    """The sum over the experts that are kept."""

    def expected(layer: Evaluation) -> torch.Tensor:
        kept = layer[Site.ROUTER_WEIGHTS] * keeps(layer[Site.ROUTER_EXPERTS])
        return (layer[ExpertValue.EXPERT_OUTPUTS] * kept[..., None]).sum(1)

    return expected


def rounded_one_by_one(layer: Evaluation) -> torch.Tensor:
    experts, weighed = (
        layer[Site.ROUTER_EXPERTS],
        layer[ExpertValue.EXPERT_OUTPUTS] * layer[Site.ROUTER_WEIGHTS][..., None],
    )
    totals = []
    for numbers, outputs in zip(experts, weighed, strict=True):
        total = torch.zeros(12)
        for _, place in sorted((number, place) for place, number in enumerate(numbers.tolist())):
            total = low(total + outputs[place])
        totals.append(total)
    return torch.stack(totals)


def per_head(layer: Evaluation, site: Site) -> torch.Tensor:
    return layer[site].unflatten(-1, (-1, 8))


INPUT, RESIDUAL = (Site.INPUT, weight_names.INPUT_NORM), (Site.ATTN_RESIDUAL, weight_names.POST_NORM)
QUERY, KEY = (Site.Q_PROJ, weight_names.Q_NORM), (Site.K_PROJ, weight_names.K_NORM)
# A mistake with parameters, a site that it changes, and what is computed there from the right values.
CASES: list[tuple[str, Parameters, Site | ExpertValue, Expected]] = [
    ("input_norm_plus_one", {}, Site.INPUT_NORM, normed(*INPUT, lambda weight: weight + 1)),
    ("post_norm_plus_one", {}, Site.POST_NORM, normed(*RESIDUAL, lambda weight: weight + 1)),
    ("input_norm_weight_missing", {}, Site.INPUT_NORM, normed(*INPUT, torch.ones_like)),
    ("post_norm_weight_missing", {}, Site.POST_NORM, normed(*RESIDUAL, torch.ones_like)),
    ("q_norm_scaled", {"factor": 4.0}, Site.Q_NORM, normed(*QUERY, lambda weight: 4 * weight)),
    ("k_norm_scaled", {"factor": 4.0}, Site.K_NORM, normed(*KEY, lambda weight: 4 * weight)),
    ("qk_norm_missing", {}, Site.K_NORM, lambda layer: layer[Site.K_PROJ]),
    (
        "norm_eps",
        {"norms": "all", "eps": 0.5},
        Site.Q_NORM,
        lambda layer: (
            layer[Site.Q_PROJ]
            / (layer[Site.Q_PROJ].square().mean(-1, keepdim=True) + 0.5).sqrt()
            * layer.weight(weight_names.Q_NORM)
        ),
    ),
    (
        "norm_mean_subtracted",
        {},
        Site.POST_NORM,
        lambda layer: functional.layer_norm(
            layer[Site.ATTN_RESIDUAL], (12,), weight=layer.weight(weight_names.POST_NORM), eps=EPS
        ),
    ),
    (
        "norm_sum_partial",
        {"groups": 3},
        Site.POST_NORM,
        lambda layer: (
            torch.cat([part / rms(part) for part in layer[Site.ATTN_RESIDUAL].split(4, -1)], -1)
            * layer.weight(weight_names.POST_NORM)
        ),
    ),
    (
        "post_norm_slice_twice",
        {"parts": 3, "part": 1},
        Site.POST_NORM,
        lambda layer: (
            layer[Site.ATTN_RESIDUAL]
            / (
                (
                    layer[Site.ATTN_RESIDUAL].square().sum(-1, keepdim=True)
                    + layer[Site.ATTN_RESIDUAL][:, 4:8].square().sum(-1, keepdim=True)
                )
                / 12
                + EPS
            ).sqrt()
            * layer.weight(weight_names.POST_NORM)
        ),
    ),
    *(
        # Of two kv heads, more ranks hold one each.
        (
            "qk_norm_per_rank",
            {"tp_degree": degree},
            site,
            lambda layer, source=source, name=name, width=width: (
                torch.cat([part / rms(part) for part in layer[source].split(width, -1)], -1)
                * layer.weight(name)
            ),
        )
        for degree, site, (source, name), width in (
            (2, Site.Q_NORM, QUERY, 16),
            (4, Site.Q_NORM, QUERY, 8),
            (4, Site.K_NORM, KEY, 8),
        )
    ),
    (
        "qk_norm_first_slice",
        {"tp_degree": 2},
        Site.Q_NORM,
        normed(*QUERY, lambda weight: torch.cat((weight[:16], weight[:16]))),
    ),
    (
        "qk_norm_weight_averaged",
        {},
        Site.K_NORM,
        normed(*KEY, lambda weight: ((weight[:8] + weight[8:]) / 2).repeat(2)),
    ),
    (
        "qk_norm_by_head_averaged",
        {},
        Site.K_NORM,
        lambda layer: (
            per_head(layer, Site.K_PROJ)
            / rms(per_head(layer, Site.K_PROJ))
            * layer.weight(weight_names.K_NORM).view(2, 8).mean(0)
        ).flatten(-2),
    ),
    *(
        (
            "k_norm_weight_of_q_norm",
            {"heads": heads},
            Site.K_NORM,
            lambda layer, start=start: (
                layer[Site.K_PROJ]
                / rms(layer[Site.K_PROJ])
                * torch.cat(
                    (
                        layer.weight(weight_names.Q_NORM)[:8],
                        layer.weight(weight_names.Q_NORM)[start : start + 8],
                    )
                )
            ),
        )
        for heads, start in (("first", 8), ("of each group", 16))
    ),
    (
        "router_softmax",
        {},
        Site.ROUTER_EXPERTS,
        best(lambda layer: layer[Site.ROUTER_LOGITS].softmax(-1) + bias(layer)),
    ),
    ("router_bias_missing", {}, Site.ROUTER_EXPERTS, best(scores)),
    (
        "router_bias_low_precision",
        {},
        Site.ROUTER_EXPERTS,
        best(lambda layer: scores(layer) + low(bias(layer))),
    ),
    (
        "router_choice_low_precision",
        {},
        Site.ROUTER_EXPERTS,
        best(lambda layer: low(scores(layer) + bias(layer))),
    ),
    ("router_bias_negated", {}, Site.ROUTER_EXPERTS, best(lambda layer: scores(layer) - bias(layer))),
    (
        "router_sigmoid_missing",
        {},
        Site.ROUTER_EXPERTS,
        best(lambda layer: layer[Site.ROUTER_LOGITS] + bias(layer)),
    ),
    ("router_top_k", {"k": 5}, Site.ROUTER_EXPERTS, best(lambda layer: scores(layer) + bias(layer), 5)),
    (
        "router_bias_in_weights",
        {},
        Site.ROUTER_WEIGHTS,
        lambda layer: whole(chosen(layer, scores(layer) + bias(layer))),
    ),
    ("router_weights_not_normalised", {}, Site.ROUTER_WEIGHTS, lambda layer: chosen(layer, scores(layer))),
    (
        "router_weights_scaled",
        {"factor": 2.5},
        Site.ROUTER_WEIGHTS,
        lambda layer: 2.5 * whole(chosen(layer, scores(layer))),
    ),
    (
        "router_softmax_of_chosen",
        {},
        Site.ROUTER_WEIGHTS,
        lambda layer: chosen(layer, layer[Site.ROUTER_LOGITS]).softmax(-1),
    ),
    ("router_weights_uniform", {}, Site.ROUTER_WEIGHTS, lambda layer: torch.full((10, 3), 1 / 3)),
    (
        "router_low_precision",
        {},
        Site.ROUTER_LOGITS,
        lambda layer: (
            layer[Site.POST_NORM].bfloat16() @ layer.weight(weight_names.GATE).bfloat16().T
        ).float(),
    ),
    (
        "router_gate_low_precision",
        {},
        Site.ROUTER_LOGITS,
        lambda layer: layer[Site.POST_NORM] @ low(layer.weight(weight_names.GATE)).T,
    ),
    (
        "expert_ids_shifted",
        {"offset": 5},
        ExpertValue.EXPERT_NUMBERS,
        renumbered(lambda numbers: (numbers + 5) % 12),
    ),
    (
        "experts_in_text_order",
        {},
        ExpertValue.EXPERT_NUMBERS,
        renumbered(lambda numbers: torch.tensor([0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9])[numbers]),
    ),
    (
        "experts_exchanged",
        {"first": 2, "second": 7},
        ExpertValue.EXPERT_NUMBERS,
        renumbered(lambda numbers: torch.tensor([0, 1, 7, 3, 4, 5, 6, 2, 8, 9, 10, 11])[numbers]),
    ),
    ("experts_zero", {}, Site.MOE_DELTA, lambda layer: torch.zeros(10, 12)),
    (
        "experts_local_only",
        {"ep_degree": 4, "rank": 1},
        Site.MOE_DELTA,
        summed(lambda numbers: (numbers >= 3) & (numbers < 6)),
    ),
    (
        "experts_rank_missing",
        {"ep_degree": 4, "rank": 1},
        Site.MOE_DELTA,
        summed(lambda numbers: (numbers < 3) | (numbers >= 6)),
    ),
    ("expert_accumulation_low_precision", {}, Site.MOE_DELTA, rounded_one_by_one),
    (
        "moe_delta_scaled",
        {"factor": 8.0},
        Site.MOE_DELTA,
        lambda layer: 8 * summed(torch.ones_like)(layer),
    ),
    ("o_proj_zero", {}, Site.ATTN_DELTA, lambda layer: torch.zeros(10, 12)),
    (
        "attention_delta_scaled",
        {"factor": 4.0},
        Site.ATTN_DELTA,
        lambda layer: 4 * layer[Site.ATTN_CONTEXT] @ layer.weight(weight_names.O_PROJ).T,
    ),
    ("attention_residual_missing", {}, Site.ATTN_RESIDUAL, lambda layer: layer[Site.ATTN_DELTA]),
    ("moe_residual_missing", {}, Site.OUTPUT, lambda layer: layer[Site.MOE_DELTA]),
    (
        "residual_after_norm",
        {},
        Site.ATTN_RESIDUAL,
        lambda layer: layer.rows(Site.INPUT_NORM) + layer[Site.ATTN_DELTA],
    ),
    (
        "moe_residual_from_input",
        {},
        Site.OUTPUT,
        lambda layer: layer.rows(Site.INPUT) + layer[Site.MOE_DELTA],
    ),
    (
        "post_norm_of_input",
        {},
        Site.POST_NORM,
        lambda layer: (
            layer.rows(Site.INPUT) / rms(layer.rows(Site.INPUT)) * layer.weight(weight_names.POST_NORM)
        ),
    ),
]


@pytest.mark.parametrize(("name", "parameters", "site", "expected"), CASES)
def test_changed_site_is_what_the_port_computes(
    layer: Evaluation, name: str, parameters: Parameters, site: Site | ExpertValue, expected: Expected
) -> None:
    # The stage alone, on right values: mistakes of several sites would change its input too.
    found = find(name).build(**parameters).stages[site](layer)
    torch.testing.assert_close(found, expected(layer))
    assert not torch.equal(found, layer[site])


def test_softmax_weighs_the_chosen_experts_too(layer: Evaluation) -> None:
    found = find("router_softmax").build().stages[Site.ROUTER_WEIGHTS](layer)
    torch.testing.assert_close(found, whole(chosen(layer, layer[Site.ROUTER_LOGITS].softmax(-1))))


def test_weights_on_the_input_weigh_gate_and_up(layer: Evaluation) -> None:
    change = find("router_weights_on_input").build()
    gate, up = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(2))
    shares = torch.arange(1.0, 6.0)
    assert change.recipe is not None
    found = change.recipe.mix(gate, up, shares)
    torch.testing.assert_close(found, functional.silu(gate * shares[:, None]) * up * shares[:, None])
    # What they put out is then added as it is.
    found = change.stages[Site.MOE_DELTA](layer)
    torch.testing.assert_close(found, layer[ExpertValue.EXPERT_OUTPUTS].sum(1))


@pytest.mark.parametrize(
    ("stored", "rounded"),
    [
        ("fp8 by block", lambda gate: fp8_blocks(gate, block=128)),
        ("fp8 by tensor", lambda gate: fp8_blocks(gate, block=256)),
        ("fp8 by row", lambda gate: fp8_groups(gate, 256)),
        ("int8 by tensor", lambda gate: (gate / gate.abs().max() * 127).round() * gate.abs().max() / 127),
        ("int8 by row", lambda gate: integer_groups(gate, 256, largest=127.0)),
        ("int8 by 64 with offsets", lambda gate: offset_groups(gate, 64, num_steps=255)),
        ("int4 by 128", lambda gate: integer_groups(gate, 128, largest=7.0)),
        ("int4 by row", lambda gate: integer_groups(gate, 256, largest=7.0)),
    ],
)
def test_gate_is_quantised_with_a_scale_for_each_part(
    stored: str, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    gate = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    # Each quarter, and each row, has its own largest number.
    gate[:128, :128] *= 9
    gate *= torch.arange(1, 257)[:, None]

    class Router(dict[Site, torch.Tensor]):
        def weight(self, _: str) -> torch.Tensor:
            return gate

    found = (
        find("router_quantised")
        .build(stored=stored)
        .stages[Site.ROUTER_LOGITS](cast("Evaluation", Router({Site.POST_NORM: torch.eye(256)})))
    )
    torch.testing.assert_close(found, rounded(gate).T)
    assert not torch.equal(found, gate.T)


GATE, UP = 3 * torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))
TURNS = torch.stack((GATE, UP), -1).flatten(-2)
FUSED = torch.cat((GATE, UP), -1)


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("gate_up_swapped", {}, functional.silu(UP) * GATE),
        ("up_plus_one", {}, functional.silu(GATE) * (UP + 1)),
        ("gelu_activation", {"approximate": "tanh"}, functional.gelu(GATE, approximate="tanh") * UP),
        ("relu_activation", {}, GATE.clamp(min=0) * UP),
        ("activation_missing", {}, GATE * UP),
        ("swiglu_clamped", {"limit": 1.0}, functional.silu(GATE.clamp(max=1)) * UP.clamp(-1, 1)),
        ("up_clamped", {"limit": 1.0, "side": "above"}, functional.silu(GATE) * UP.clamp(max=1)),
        ("up_clamped", {"limit": 1.0, "side": "both"}, functional.silu(GATE) * UP.clamp(-1, 1)),
        ("gate_up_interleaved", {}, functional.silu(FUSED[:, ::2]) * FUSED[:, 1::2]),
        ("gate_up_cut_in_halves", {}, functional.silu(TURNS[:, :6]) * TURNS[:, 6:]),
        (
            "experts_width_partial",
            {"tp_degree": 3, "rank": 1},
            functional.silu(GATE) * UP * torch.tensor([0, 0, 1, 1, 0, 0]),
        ),
    ],
)
def test_gate_and_up_are_combined_as_the_port_does(
    name: str, parameters: Parameters, expected: torch.Tensor
) -> None:
    recipe = find(name).build(**parameters).recipe
    assert recipe is not None
    torch.testing.assert_close(recipe.mix(GATE, UP, torch.ones(5)), expected)


def test_numbers_of_experts_near_the_right_one_are_tried(layer: Evaluation) -> None:
    inputs = replace(layer.inputs, spec=replace(layer.spec, num_local_experts=64, num_experts_per_tok=8))
    tried = [one["k"] for one in find("router_top_k").candidates(inputs)]
    assert tried == [1, 2, 4, 7, 9, 16, 6, 10]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("experts_in_text_order", {"num_local_experts": 10}),
        ("experts_exchanged", {"num_local_experts": 1, "num_experts_per_tok": 1}),
        ("q_heads_interleaved", {"num_key_value_heads": 1}),
        ("q_heads_interleaved", {"num_key_value_heads": 4}),
        ("qkv_cut_per_group", {"num_key_value_heads": 1}),
        ("kv_repeat_tiled", {"num_key_value_heads": 1}),
        ("rope_wrong_slice", {"rotary_dim": 6}),
    ],
)
def test_mistake_that_cannot_show_is_not_tried(layer: Evaluation, name: str, parts: dict[str, int]) -> None:
    inputs = replace(layer.inputs, spec=replace(layer.spec, **parts))
    assert find(name).candidates(layer.inputs)
    assert find(name).candidates(inputs) == ()


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_key_norm_has_one_other_weight_where_every_key_has_one_query(
    layer: Evaluation, num_kv_heads: int
) -> None:
    inputs = replace(layer.inputs, spec=replace(layer.spec, num_key_value_heads=num_kv_heads))
    assert find("k_norm_weight_of_q_norm").candidates(inputs) == ({"heads": "first"},)
