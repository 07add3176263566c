"""Planted mistakes are wrong where they say and nowhere else, and other tools' rules are as their sources say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from faults.baseline import Baseline, BaselineRequest, open_baseline
from faults.dump_runs import PlannedDump, carry_out_dump
from faults.effects import measure_effects, run_float32
from faults.plant import Plant, pair_plants
from faults.planted import EQUIVALENTS, MISTAKES, choose_plants
from faults.rivals import RULES

from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
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


def downstream(sites: tuple[Site, ...]) -> set[Site]:
    """The sites, and all that is computed from them."""
    found = set(sites)
    for site, inputs in ModelGraph().layer(0).inputs.items():
        if found & set(inputs):
            found.add(site)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plant", [plant for plant in MISTAKES if plant.prefills], ids=str)
def test_plant_changes_its_sites_and_nothing_before_or_beside_them(plant: Plant, prefilled: Baseline) -> None:
    effects = measure_effects(prefilled, 0, plant)
    assert max(effects[site] for site in plant.sites) > 0
    elsewhere = effects.keys() - downstream(plant.sites)
    assert {site for site in elsewhere if effects[site] != 0} == set()


@pytest.mark.slow
@pytest.mark.parametrize("plant", [plant for plant in MISTAKES if plant.decodes], ids=str)
def test_plant_in_decode_rows_changes_its_sites(plant: Plant, decoded: Baseline) -> None:
    effects = measure_effects(decoded, 0, plant, num_decoded=1)
    assert max(effects[site] for site in plant.sites) > 0


@pytest.mark.parametrize("plant", EQUIVALENTS, ids=str)
def test_equivalent_changes_the_output_by_less_than_the_floor(plant: Plant, prefilled: Baseline) -> None:
    assert measure_effects(prefilled, 0, plant)[Site.OUTPUT] < 1.0


def test_pair_computes_as_each_of_its_mistakes_does(prefilled: Baseline) -> None:
    attention, moe = choose_plants(["o_proj_zero", "gate_up_swapped"])
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
