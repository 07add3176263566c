"""Changes of the layer compute what a planted port does, or a formula where none is planted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from faults.plant import Kind, Plant
from faults.planted import MISTAKES
from faults.port import PlantedLayer

from compare.catalogue.candidates import Parameters
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.low_bits import fp8_blocks, fp8_groups, integer_groups, offset_groups
from compare.catalogue.mistake import Mistake
from minimax_tools.capture.recorder import Recorder, copy_to_host, shape_to_batch
from minimax_tools.capture.taps import Tap
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.metrics.noise_floor import token_rows
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import (
    CHOICES,
    STAGES,
    Evaluation,
    ExpertValue,
    LayerInputs,
    choice_rows,
)
from minimax_tools.reference.expert_pass import LayerWeights

Expected = Callable[[Evaluation], torch.Tensor]
# The second row is padded in front, and its positions are past what float16 counts.
MASK = torch.ones(2, 70, dtype=torch.int64)
MASK[1, :20] = 0
POSITIONS = (MASK.cumsum(1) - 1).clamp(min=0) + torch.tensor([[0], [4092]])
# Parameters of the catalogue's that the plants have without a name.
FURTHER: dict[str, Parameters] = {
    "norm_eps": {"norms": "all"},
    "expert_capacity": {"counted": "real"},
    "gelu_activation": {"approximate": "none"},
    "q_heads_interleaved": {"order": "by group"},
    "rope_low_precision": {"rounded": "all"},
}
# What is planted rounds a float32 port, and the catalogue's mistake a BF16 one.
OF_BFLOAT16 = {"qk_norm_low_precision"}
PLANTS = [plant for plant in MISTAKES if plant.kind is Kind.CATALOGUED and plant.name not in OF_BFLOAT16]


def find(name: str) -> Mistake:
    return CATALOGUE[name]


def states_of(tensors: LayerTensors) -> torch.Tensor:
    width = tensors.given_shape(weight_names.INPUT_NORM)[0]
    return torch.randn(*MASK.shape, width, generator=torch.Generator().manual_seed(0))


def evaluate(tensors: LayerTensors) -> Evaluation:
    inputs = LayerInputs(
        spec=ModelSpec.from_folder(tensors.reader.folder),
        weights=LayerWeights(tensors),
        attention_mask=MASK,
        position_ids=POSITIONS,
        decode_start=MASK.shape[1],
    )
    values = {Site.INPUT: states_of(tensors)}
    return Evaluation(inputs, STAGES, tokens=inputs.judged_tokens, values=values)


@pytest.fixture(scope="module")
def fp8_tensors(toy: Path) -> LayerTensors:
    return LayerTensors.open(CheckpointReader(toy), ModelSpec.from_folder(toy), 2, torch.bfloat16)


@pytest.fixture(scope="module")
def right_layers(tensors: LayerTensors, fp8_tensors: LayerTensors) -> dict[bool, Evaluation]:
    """The right layer, from a float32 checkpoint and from one in FP8."""
    return {False: evaluate(tensors), True: evaluate(fp8_tensors)}


def run_planted(plant: Plant, tensors: LayerTensors, config: Any) -> dict[Site, torch.Tensor]:
    """Run a planted port in float32: the real tokens [T,F] of the sites at which its mistake shows."""
    module = PlantedLayer(config, plant)
    state = module.convert_state_dict(tensors.copy(), config, tensors.layer)
    module.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    taps = {site: Tap(path=f"taps.{site}") for site in Site if site not in (Site.INPUT, Site.OUTPUT)}
    with torch.no_grad(), Recorder(module, taps, keep=copy_to_host) as recorder:
        output, _ = module(states_of(tensors), MASK, POSITIONS)
    shown = {site: shape_to_batch(site, value, MASK.shape) for site, value in recorder.tensors.items()}
    real = {
        site: token_rows(value, site)[MASK.bool()] for site, value in {**shown, Site.OUTPUT: output}.items()
    }
    experts, weights = (real[site] for site in CHOICES)
    num_experts = config.num_local_experts
    return {
        **real,
        Site.ROUTER_EXPERTS: choice_rows(experts, None, num_experts),
        Site.ROUTER_WEIGHTS: choice_rows(experts, weights, num_experts),
    }


def parameters_of(plant: Plant) -> Parameters:
    if plant.name == "router_quantised":
        return {"stored": "fp8 by block" if plant.parameters["bits"] == 8 else "int4 by 128"}
    return {**plant.parameters, **FURTHER.get(plant.name, {})}


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_planted_port_computes_what_the_mistake_predicts(
    plant: Plant, tensors: LayerTensors, fp8_tensors: LayerTensors, right_layers: Any
) -> None:
    layer, of_port = right_layers[plant.needs_fp8], fp8_tensors if plant.needs_fp8 else tensors
    change = find(plant.name).build(**parameters_of(plant))
    planted = run_planted(plant, of_port, SimpleNamespace(**layer.spec.quantities()))
    sites = [site for site in plant.sites if site in change.sites]
    assert sites
    with torch.no_grad():
        changed = layer.changed(change)
        for site in sites:
            error = (planted[site] - layer.rows(site)).norm()
            assert error > 0.0, site
            assert (changed.rows(site) - planted[site]).norm() < 0.01 * error, site


def scores(layer: Evaluation) -> torch.Tensor:
    return layer[Site.ROUTER_LOGITS].sigmoid()


def bias(layer: Evaluation) -> torch.Tensor:
    return layer.weight(weight_names.CORRECTION_BIAS)


def low(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def slice_counted_twice(layer: Evaluation) -> torch.Tensor:
    states, weight = layer[Site.ATTN_RESIDUAL], layer.weight(weight_names.POST_NORM)
    squares = states.square().sum(-1, keepdim=True) + states[:, 4:8].square().sum(-1, keepdim=True)
    return states / (squares / 12 + 1e-2).sqrt() * weight


def without_experts_3_to_5(layer: Evaluation) -> torch.Tensor:
    numbers = layer[Site.ROUTER_EXPERTS]
    kept = layer[Site.ROUTER_WEIGHTS] * ((numbers < 3) | (numbers >= 6))
    return (layer[ExpertValue.EXPERT_OUTPUTS] * kept[..., None]).sum(1)


def rotated_keys(layer: Evaluation, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """The keys, of which dims 0 and 1 turn with dims 2 and 3."""
    keys, angles = layer[Site.K_NORM].unflatten(-1, (2, 8)).transpose(1, 2), positions * frequencies
    cos, sin = angles[:, None].cos(), angles[:, None].sin()
    one, other = keys[..., :2], keys[..., 2:4]
    return torch.cat((one * cos - other * sin, other * cos + one * sin, keys[..., 4:]), -1)


# Of base 100, over four dims.
FREQUENCIES = torch.tensor([1.0, 0.1])
# Mistakes that no port is planted with, or not with these parameters; a site, and what is computed there.
CASES: list[tuple[str, Parameters, Site, Expected]] = [
    ("post_norm_slice_twice", {"parts": 3, "part": 1}, Site.POST_NORM, slice_counted_twice),
    (
        "router_choice_low_precision",
        {},
        Site.ROUTER_EXPERTS,
        lambda layer: low(scores(layer) + bias(layer)).topk(3).indices,
    ),
    ("experts_zero", {}, Site.MOE_DELTA, lambda layer: torch.zeros(10, 12)),
    ("experts_rank_missing", {"ep_degree": 4, "rank": 1}, Site.MOE_DELTA, without_experts_3_to_5),
    (
        "rope_low_precision",
        {"rounded": "angles"},
        Site.K_ROPE,
        lambda layer: rotated_keys(
            layer, low(layer.position_ids[..., None].float() * FREQUENCIES), torch.ones(2)
        ),
    ),
    (
        "rope_low_precision",
        {"rounded": "frequencies"},
        Site.K_ROPE,
        lambda layer: rotated_keys(layer, layer.position_ids[..., None], low(FREQUENCIES)),
    ),
    (
        "rope_positions_at_chunk_edges",
        {"size": 3, "of": "queries and keys", "counted": "columns"},
        Site.K_ROPE,
        lambda layer: rotated_keys(
            layer, layer.position_ids[..., None] - torch.tensor([0, 0, 0, 1, 0, 0])[:, None], FREQUENCIES
        ),
    ),
]


@pytest.mark.parametrize(("name", "parameters", "site", "expected"), CASES)
def test_changed_site_is_what_the_port_computes(
    layer: Evaluation, name: str, parameters: Parameters, site: Site, expected: Expected
) -> None:
    # The stage alone, on right values: mistakes of several sites would change its input too.
    found = find(name).build(**parameters).stages[site](layer)
    torch.testing.assert_close(found, expected(layer))
    assert not torch.equal(found, layer[site])


def test_gelu_may_be_the_approximate_one() -> None:
    gate, up = 3 * torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))
    recipe = find("gelu_activation").build(approximate="tanh").recipe
    assert recipe is not None
    expected = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(recipe.mix(gate, up, torch.ones(5)), expected)


@pytest.mark.parametrize(
    ("stored", "rounded"),
    [
        ("fp8 by tensor", lambda gate: fp8_blocks(gate, block=256)),
        ("fp8 by row", lambda gate: fp8_groups(gate, 256)),
        ("int8 by tensor", lambda gate: (gate / gate.abs().max() * 127).round() * gate.abs().max() / 127),
        ("int8 by row", lambda gate: integer_groups(gate, 256, largest=127.0)),
        ("int8 by 64 with offsets", lambda gate: offset_groups(gate, 64, num_steps=255)),
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
