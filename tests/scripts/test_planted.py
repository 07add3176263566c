"""Planted mistakes are wrong where they say and nowhere else, and other tools' rules are as their sources say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from faults.baseline import Baseline, BaselineRequest, open_baseline
from faults.dump_runs import PlannedDump, carry_out_dump
from faults.effects import measure_effects, run_float32
from faults.judging import as_black_box, judge_run, name_mistake
from faults.plant import Kind, Plant, fit_plants, pair_plants
from faults.planted import EQUIVALENTS, MISTAKES, choose_plants
from faults.port import PlantedPort
from faults.rivals import RULES
from faults.runs import run_port

from minimax_tools.model.families.minimax_m3 import MINIMAX_M3
from minimax_tools.model.graph import LayerGraph, ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.devices.runtime import open_runtime

# On the left padding that one of them needs, and the far row that others do; 70 rows reach the end of a bucket, and a
# window's.
PREFILLED = BaselineRequest(
    name="tiny",
    seed=0,
    lengths=(70, 7),
    padding_side="left",
    start_positions=(0, 4092),
    num_layers=1,
    intermediate_size=128,
)
DECODED = BaselineRequest(name="decoded", seed=0, lengths=(40, 39), num_layers=1, intermediate_size=128)
DUMPED = BaselineRequest(name="dumped", seed=0, lengths=(20, 7), num_layers=3, intermediate_size=128)
# Its first layer is dense.
M3 = SyntheticModel.toy(MINIMAX_M3).resized(num_hidden_layers=2)
OF_M3 = BaselineRequest(name="m3", seed=0, lengths=(40, 33), num_layers=2, shape=M3)
OF_M2 = fit_plants(MISTAKES, ModelGraph())
# Mistakes that MiniMax-M2 cannot have.
FURTHER = [
    plant
    for plant in fit_plants(MISTAKES, M3.spec().graph)
    # No value of the toy reaches the limit of its clamp.
    if not plant.fits(ModelGraph()) and plant.name != "swiglu_clamp_missing"
]
# Those of them that are blamed and named in the fast suite: one of each part of a layer.
NAMED = ["norm_one_plus_missing", "routed_scale_missing", "dense_mlp_zero"]
GOLDEN = torch.linspace(-3, 3, 600, dtype=torch.float64).reshape(20, 30) + 0.01
TWIN = GOLDEN * (1 + 1e-3)
FLOOR = float((GOLDEN - TWIN).norm())
# At right angles to the golden and of its norm: what a rule on direction sees.
OTHER = torch.randn(GOLDEN.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OTHER -= GOLDEN * (OTHER * GOLDEN).sum() / GOLDEN.square().sum()
OTHER *= GOLDEN.norm() / OTHER.norm()


@pytest.fixture(scope="module")
def prefilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    with open_baseline(PREFILLED, tmp_path_factory.mktemp("faults")) as opened:
        yield opened


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    with open_baseline(DECODED, tmp_path_factory.mktemp("faults")) as opened:
        yield opened


@pytest.fixture(scope="module")
def of_m3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    with open_baseline(OF_M3, tmp_path_factory.mktemp("faults")) as opened:
        yield opened


def downstream(sites: tuple[Site, ...], graph: LayerGraph) -> set[Site]:
    """The sites, and all that is computed from them."""
    found = set(sites)
    for site, inputs in graph.inputs.items():
        if found & set(inputs):
            found.add(site)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plant", [plant for plant in OF_M2 if plant.prefills], ids=str)
def test_plant_changes_its_sites_and_nothing_before_or_beside_them(plant: Plant, prefilled: Baseline) -> None:
    check_effects(prefilled, 0, plant)


def check_effects(baseline: Baseline, layer: int, plant: Plant) -> None:
    effects = measure_effects(baseline, layer, plant)
    assert max(effects[site] for site in plant.sites) > 0
    elsewhere = effects.keys() - downstream(plant.sites, baseline.spec.graph.layer(layer))
    assert {site for site in elsewhere if effects[site] != 0} == set()


@pytest.mark.parametrize(
    "plant",
    [pytest.param(plant, marks=() if plant.name in NAMED else pytest.mark.slow) for plant in FURTHER],
    ids=str,
)
def test_mistake_that_minimax_m2_cannot_have_is_blamed_and_named(
    plant: Plant, of_m3: Baseline, tmp_path: Path
) -> None:
    layer = of_m3.layers_with(plant.sites)[-1]
    check_effects(of_m3, layer, plant)
    with open_runtime("cpu") as runtime:
        target = PlantedPort(plant=plant, layers=frozenset({layer})).target()
        capture = run_port(of_m3, target, runtime=runtime, directory=tmp_path / "run")
    blame = judge_run(of_m3, capture).blame
    assert {blamed.layer for blamed in blame} == {layer}
    assert {site for blamed in blame for site in blamed.sites} <= set(map(str, plant.sites))
    named = [name for name, _ in name_mistake(of_m3, as_black_box(capture), layer)]
    assert (plant.name in named) == (plant.kind is Kind.CATALOGUED)


def gain_slightly_off(_: Any, layer: Any, residual: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
    weight = layer.weights.post_norm
    return layer.normalise(residual, (weight + 0.005 * (weight.float().mean() - weight)).to(weight.dtype))


def test_gain_that_is_slightly_off_is_no_scale_that_one_reader_undoes(tmp_path: Path) -> None:
    # The experts, beside the golden's weights of the router, would be wrong on what they were fed; on the port's they
    # are right.
    plant = Plant("gain_slightly_off", (Site.POST_NORM,), {"post_norm": gain_slightly_off})
    request = BaselineRequest(name="gain", seed=0, lengths=(48, 33), num_layers=1)
    with open_baseline(request, tmp_path) as baseline, open_runtime("cpu") as runtime:
        target = PlantedPort(plant=plant, layers=frozenset({0})).target()
        capture = run_port(baseline, target, runtime=runtime, directory=tmp_path / "run")
        assert [blamed.sites for blamed in judge_run(baseline, capture).blame] == [("post_norm",)]


@pytest.mark.slow
@pytest.mark.parametrize("plant", [plant for plant in OF_M2 if plant.decodes], ids=str)
def test_plant_in_decode_rows_changes_its_sites(plant: Plant, decoded: Baseline) -> None:
    effects = measure_effects(decoded, 0, plant, num_decoded=1)
    assert max(effects[site] for site in plant.sites) > 0


@pytest.mark.parametrize("plant", EQUIVALENTS, ids=str)
def test_equivalent_changes_the_output_by_less_than_the_floor(plant: Plant, prefilled: Baseline) -> None:
    assert measure_effects(prefilled, 0, plant)[Site.OUTPUT] < 1.0


def test_pair_computes_as_each_of_its_mistakes_does(prefilled: Baseline) -> None:
    attention, moe = fit_plants(choose_plants(["o_proj_zero", "gate_up_swapped"]), ModelGraph())
    (pair,) = pair_plants((attention, moe), seed=0)
    both, first = (run_float32(prefilled, 0, plant) for plant in (pair, attention))
    assert torch.equal(both[Site.POST_NORM], first[Site.POST_NORM])
    assert not torch.equal(both[Site.MOE_DELTA], first[Site.MOE_DELTA])
    assert pair.sites == (*attention.sites, *moe.sites)


@pytest.mark.slow
def test_dump_of_a_wrong_port_is_judged_in_every_view(tmp_path: Path) -> None:
    (plant,) = choose_plants(["moe_residual_missing"])
    with open_baseline(DUMPED, tmp_path) as baseline, open_runtime("cpu") as runtime:
        wrong, right = (
            carry_out_dump(planned, baseline, runtime=runtime, directory=tmp_path / "run")
            for planned in (PlannedDump(request=DUMPED, plant=plant, layer=2), PlannedDump(request=DUMPED))
        )
    views = {(case.view, case.has_checkpoint): case for case in wrong}
    assert {view for view, _ in views} == {"whole", "no_experts", "outputs", "vllm_neuron"}
    assert views["whole", True].is_detected
    assert views["whole", True].is_layer_named
    assert views["outputs", True].shown == ("input", "output")
    assert {case.verdict for case in right} <= {"pass", "incomparable"}


@pytest.mark.parametrize(
    ("rule", "within", "beyond"),
    [
        # cosine 0.99 is an angle whose tangent is 0.1425
        ("tenstorrent", GOLDEN + 0.14 * OTHER, GOLDEN + 0.145 * OTHER),
        ("msprobe", GOLDEN + 0.14 * OTHER, GOLDEN + 0.145 * OTHER),
        ("msprobe_both", GOLDEN + 0.0009, GOLDEN + 0.0011),
        ("polygraphy", GOLDEN * (1 + 0.9e-5), GOLDEN * (1 + 1.1e-5)),
        # 4.5 % of relative L2
        ("sglang", GOLDEN + 0.044 * OTHER, GOLDEN + 0.046 * OTHER),
        ("vllm_neuron", TWIN + OTHER / OTHER.norm() * 5.9 * FLOOR, TWIN + OTHER / OTHER.norm() * 6.1 * FLOOR),
        (
            "aws_equivalence",
            TWIN + OTHER / OTHER.norm() * 1.19 * FLOOR,
            TWIN + OTHER / OTHER.norm() * 1.21 * FLOOR,
        ),
        ("seeds", GOLDEN + 0.0009, GOLDEN + 0.0011),
    ],
)
def test_limit_of_a_rule_lies_where_it_is_published(
    rule: str, within: torch.Tensor, beyond: torch.Tensor
) -> None:
    assert not RULES[rule](GOLDEN, within, TWIN)
    assert RULES[rule](GOLDEN, beyond, TWIN)
