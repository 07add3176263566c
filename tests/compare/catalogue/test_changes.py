"""Changes of the layer compute what a planted port does, or a formula where none is planted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from faults.plant import Kind, Plant, fit_plants
from faults.planted import MISTAKES
from faults.port import PlantedLayer

from compare.catalogue.candidates import Parameters
from compare.catalogue.catalogue import CATALOGUE
from compare.catalogue.low_bits import (
    ROUNDINGS,
    fp8_blocks,
    fp8_groups,
    integer_groups,
    offset_groups,
)
from compare.catalogue.mistake import Mistake
from minimax_tools.capture.recorder import Recorder, copy_to_host, shape_to_batch
from minimax_tools.capture.taps import Tap
from minimax_tools.checkpoint.fp8 import decode_codes
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.metrics.noise_floor import token_rows
from minimax_tools.model import weight_names
from minimax_tools.model.families.glm4_moe import GLM4_MOE
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.families.minimax_m3 import MINIMAX_M3
from minimax_tools.model.families.qwen3_moe import QWEN3_MOE
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import EXPERT_MATRICES
from minimax_tools.reference.evaluation import (
    CHOICES,
    STAGES,
    Evaluation,
    ExpertValue,
    LayerInputs,
    choice_rows,
)
from minimax_tools.reference.expert_pass import Allocate, Decoding, ExpertSlots, LayerWeights
from minimax_tools.reference.float32_stages import PROJECTIONS
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.ports.target import target_config

Expected = Callable[[Evaluation], torch.Tensor]
RightLayer = Callable[[str, int, bool], tuple[LayerTensors, Evaluation]]
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
    "up_plus_one_missing": {"alpha": 1.702, "limit": 7.0},
    "swiglu_clamp_missing": {"alpha": 1.702},
    "swiglu_alpha_missing": {"limit": 7.0},
}
# What is planted rounds a float32 port, and the catalogue's mistake a BF16 one.
OF_BFLOAT16 = {"qk_norm_low_precision"}
# Where other families' graphs differ: of MiniMax-M3 in nearly all sites, of the others in these.
DIFFERING = {
    GLM4_MOE.model_type: {
        *PROJECTIONS,
        Site.ROUTER_WEIGHTS,
        Site.ROUTED_DELTA,
        Site.SHARED_DELTA,
        Site.MOE_DELTA,
    },
    QWEN3_MOE.model_type: {Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS},
}


def plants_of(family: Family) -> list[tuple[Family, Plant]]:
    graph = SyntheticModel.toy(family).spec().graph
    return [
        (family, plant)
        for plant in fit_plants(MISTAKES, graph)
        if plant.kind is Kind.CATALOGUED and plant.name not in OF_BFLOAT16
        # Reading FP8 is the same in all families.
        if family is MINIMAX_M2 or not plant.needs_fp8
        if DIFFERING.get(family.model_type, set(plant.sites)).intersection(plant.sites)
    ]


PLANTS = [case for family in (MINIMAX_M2, MINIMAX_M3, GLM4_MOE, QWEN3_MOE) for case in plants_of(family)]


def find(name: str) -> Mistake:
    return CATALOGUE[name]


def states_of(tensors: LayerTensors) -> torch.Tensor:
    width = tensors.given_shape(weight_names.INPUT_NORM)[0]
    return torch.randn(*MASK.shape, width, generator=torch.Generator().manual_seed(0))


def evaluate(tensors: LayerTensors) -> Evaluation:
    spec = ModelSpec.from_folder(tensors.reader.folder)
    inputs = LayerInputs(
        graph=spec.graph.layer(tensors.layer),
        spec=spec,
        weights=LayerWeights(tensors),
        attention_mask=MASK,
        position_ids=POSITIONS,
        decode_start=MASK.shape[1],
    )
    values = {Site.INPUT: states_of(tensors)}
    return Evaluation(inputs, STAGES, tokens=inputs.judged_tokens, values=values)


@pytest.fixture(scope="module")
def right_layer(toy: Path, float32_layer: Callable[..., LayerTensors]) -> RightLayer:
    """A model type's right layer with its tensors, from a float32 checkpoint, or MiniMax-M2's from one in FP8."""

    @cache
    def make(model_type: str, layer: int, is_fp8: bool) -> tuple[LayerTensors, Evaluation]:
        of_port = float32_layer(model_type, layer)
        if is_fp8:
            of_port = LayerTensors.open(CheckpointReader(toy), ModelSpec.from_folder(toy), 2, torch.bfloat16)
        return of_port, evaluate(of_port)

    return make


def run_planted(plant: Plant, tensors: LayerTensors, spec: ModelSpec) -> dict[Site, torch.Tensor]:
    """Run a planted port in float32: the real tokens [T,F] of the sites at which its mistake shows."""
    config = target_config(spec)
    module = PlantedLayer(config, tensors.layer, plant)
    state = module.convert_state_dict(tensors.copy(), config, tensors.layer)
    module.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    taps = {Site(site): Tap(path=f"taps.{site}") for site in module.taps}
    with torch.no_grad(), Recorder(module, taps, keep=copy_to_host) as recorder:
        output, _ = module(states_of(tensors), MASK, POSITIONS)
    shown = {site: shape_to_batch(site, value, MASK.shape) for site, value in recorder.tensors.items()}
    real = {
        site: token_rows(value, site)[MASK.bool()] for site, value in {**shown, Site.OUTPUT: output}.items()
    }
    if Site.ROUTER_EXPERTS not in real:
        return real
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


@pytest.mark.parametrize(
    ("family", "plant"), PLANTS, ids=[f"{family.toy_preset}-{plant}" for family, plant in PLANTS]
)
def test_planted_port_computes_what_the_mistake_predicts(
    family: Family, plant: Plant, right_layer: RightLayer
) -> None:
    # The first layer is dense where there are dense ones.
    of_port, layer = right_layer(family.model_type, int(Site.MLP_DELTA not in plant.sites), plant.needs_fp8)
    mistake = find(plant.name)
    assert mistake.fits(layer.spec.graph)
    change = mistake.build(**parameters_of(plant))
    planted = run_planted(plant, of_port, layer.spec)
    sites = [site for site in plant.sites if site in change.sites_in(layer.graph)]
    assert sites
    with torch.no_grad():
        changed = layer.changed(change)
        for site in sites:
            error = (planted[site] - layer.rows(site)).norm()
            assert error > 0.0, site
            # Sums that lie between two BF16 numbers are rounded either way.
            share = 0.02 if mistake.is_rounding else 0.01
            assert (changed.rows(site) - planted[site]).norm() < share * error, site


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


def of_layer_5(layer: Evaluation, name: str) -> torch.Tensor:
    return layer.weights.of_layer(5).kept_value(name)


def normed_by_layer_5(layer: Evaluation) -> torch.Tensor:
    root = (layer[Site.INPUT].square().mean(-1, keepdim=True) + 1e-2).sqrt()
    return layer[Site.INPUT] / root * of_layer_5(layer, weight_names.INPUT_NORM)


def chosen_by_layer_5(layer: Evaluation) -> torch.Tensor:
    return (scores(layer) + of_layer_5(layer, weight_names.CORRECTION_BIAS)).topk(3).indices


def projected_by_layer_5(source: Site, name: str) -> Expected:
    return lambda layer: layer[source] @ of_layer_5(layer, name).T


def of_low_angles(layer: Evaluation) -> torch.Tensor:
    angles = low(layer.position_ids[..., None].float() * FREQUENCIES)
    return rotated_keys(layer, angles, torch.ones(2))


def at_chunk_edges(layer: Evaluation) -> torch.Tensor:
    behind = torch.tensor([0, 0, 0, 1, 0, 0])[:, None]
    return rotated_keys(layer, layer.position_ids[..., None] - behind, FREQUENCIES)


# Of base 100, over four dims.
FREQUENCIES = torch.tensor([1.0, 0.1])
EDGES = {"size": 3, "of": "queries and keys", "counted": "columns"}
LAYER_5 = ("weights_of_another_layer", {"source_layer": 5})
# Mistakes that no port is planted with, or not with these parameters; a site, and what is computed there.
CASES: list[tuple[str, Parameters, Site | ExpertValue, Expected]] = [
    ("post_norm_slice_twice", {"parts": 3, "part": 1}, Site.POST_NORM, slice_counted_twice),
    (
        "router_choice_low_precision",
        {},
        Site.ROUTER_EXPERTS,
        lambda layer: low(scores(layer) + bias(layer)).topk(3).indices,
    ),
    ("experts_zero", {}, ExpertValue.ROUTED_SUM, lambda layer: torch.zeros(10, 12)),
    ("experts_rank_missing", {"ep_degree": 4, "rank": 1}, ExpertValue.ROUTED_SUM, without_experts_3_to_5),
    ("rope_low_precision", {"rounded": "angles"}, Site.K_ROPE, of_low_angles),
    (
        "rope_low_precision",
        {"rounded": "frequencies"},
        Site.K_ROPE,
        lambda layer: rotated_keys(layer, layer.position_ids[..., None], low(FREQUENCIES)),
    ),
    ("rope_positions_at_chunk_edges", EDGES, Site.K_ROPE, at_chunk_edges),
    (*LAYER_5, Site.INPUT_NORM, normed_by_layer_5),
    (*LAYER_5, Site.K_PROJ, projected_by_layer_5(Site.INPUT_NORM, weight_names.K_PROJ)),
    (*LAYER_5, Site.ATTN_DELTA, projected_by_layer_5(Site.ATTN_CONTEXT, weight_names.O_PROJ)),
    (*LAYER_5, Site.ROUTER_EXPERTS, chosen_by_layer_5),
]


@pytest.mark.parametrize(("name", "parameters", "site", "expected"), CASES)
def test_changed_site_is_what_the_port_computes(
    layer: Evaluation, name: str, parameters: Parameters, site: Site | ExpertValue, expected: Expected
) -> None:
    # The stage alone, on right values: mistakes of several sites would change its input too.
    found = find(name).build(**parameters).stages[site](layer)
    torch.testing.assert_close(found, expected(layer))
    assert not torch.equal(found, layer[site])


def test_recipes_of_experts_are_changed() -> None:
    gate, up = 3 * torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))
    recipe = find("gelu_activation").build(approximate="tanh").recipe
    assert recipe is not None
    expected = functional.gelu(gate, approximate="tanh") * up
    tokens = ExpertSlots(graph=ModelGraph(), shares=torch.ones(5))
    torch.testing.assert_close(recipe.mix(gate, up, tokens), expected)
    recipe = find("weights_of_another_layer").build(source_layer=5).recipe
    assert recipe is not None
    assert recipe.changed == EXPERT_MATRICES


def test_only_keys_are_rotated_as_if_edges_were_theirs() -> None:
    assert find("rope_positions_at_chunk_edges").build(size=8, of="keys").sites == {Site.K_ROPE}


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


CODES = (100 * torch.randn(256, 384, generator=torch.Generator().manual_seed(0))).to(torch.float8_e4m3fn)
SCALES = torch.tensor([[1.0, 0.3, 5.0], [2.0, 0.7, 0.1]])
BLOCKS = SCALES.repeat_interleave(128, 0).repeat_interleave(128, 1)


class Fp8Weights:
    """A weight that is stored in FP8."""

    def value(self, _: str, decoding: Decoding, *, allocate: Allocate = torch.empty) -> torch.Tensor:
        return decode_codes(
            CODES,
            decoding.scales(SCALES),
            numbers=decoding.numbers,
            dtype=torch.float32,
            out=allocate(CODES.shape),
        )


class Projection(dict[Site, torch.Tensor]):
    weights, graph = Fp8Weights(), ModelGraph().layer(0)


def test_codes_are_read_as_integers() -> None:
    projection = cast("Evaluation", Projection({Site.INPUT_NORM: torch.eye(384)}))
    change = find("fp8_codes_as_integers").build(tensor="q_proj")
    found = change.stages[Site.Q_PROJ](projection)
    torch.testing.assert_close(found, (CODES.view(torch.uint8).float() * BLOCKS).T)
    assert change.recipe is None


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", [127.0, 3.296875, -600.0]),
        ("float16", [127.0, 3.30078125, -600.0]),
        ("float8_e4m3fn", [128.0, 3.25, -448.0]),
        ("float8_e4m3fn with a scale for each row", [128.571428, 3.3482142, -600.0]),
        ("int8 with a scale for each row", [127.559055, 4.7244094, -600.0]),
    ],
)
def test_rows_are_rounded_to_each_dtype(dtype: str, expected: list[float]) -> None:
    rows = torch.tensor([[127.0, 3.3, -600.0]])
    assert ROUNDINGS[dtype](rows)[0].tolist() == pytest.approx(expected)


class TestLowBits:
    """Scales map the largest number of a block to the largest of the format."""

    def test_blocks_have_a_scale_each(self) -> None:
        weight = torch.tensor([[448.0, 101.0, 1.0], [3.3, 0.0, 0.0]])
        # 3.3 is rounded in steps of 0.25 where the largest is 448; 1.0 is the largest of its own block.
        assert fp8_blocks(weight, block=2).tolist() == [[448.0, 104.0, 1.0], [3.25, 0.0, 0.0]]

    def test_groups_of_a_row_have_a_scale_each(self) -> None:
        states = torch.tensor([[448.0, 3.3, 4.48, 0.033]])
        assert fp8_groups(states, width=2)[0].tolist() == pytest.approx([448.0, 3.25, 4.48, 0.0325])

    def test_groups_with_an_offset_have_even_steps_from_the_least(self) -> None:
        weight = torch.tensor([[1.0, 1.3, 2.0, -4.0, -1.0, 0.0]])
        found = offset_groups(weight, 3, num_steps=4)[0].tolist()
        assert found == pytest.approx([1.0, 1.25, 2.0, -4.0, -1.0, 0.0])

    def test_integers_have_steps_of_the_largest(self) -> None:
        weight = torch.tensor([[7.0, 2.4, -7.0, 0.24, 0.7, 0.0]])
        found = integer_groups(weight, 3, largest=7.0)[0].tolist()
        assert found == pytest.approx([7.0, 2.0, -7.0, 0.2, 0.7, 0.0])
