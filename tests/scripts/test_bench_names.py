"""Ports of public reports get their names, and lookalikes none: what the benchmark of names counts, and some ports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_names
from bench_names import NamedPort, give_figures
from faults import lookalikes, reported
from faults.baseline import Baseline, open_baseline
from faults.plant import Plant

from neuron.devices.runtime import Runtime, open_runtime

REPORTED = {plant.name: plant for plant in reported.PLANTS}
LOOKALIKES = {plant.name: plant for plant in lookalikes.PLANTS}
# Names in both views; others of the reports show the same names, are seen in one view alone, or have none.
NAMED = {
    "vllm#54974": "experts_scaled",
    "sglang#32962": "experts_counted_twice",
    "sglang#18213": "experts_rearranged",
    "vllm-gaudi#1796": "experts_missing",
    "sglang#32430": "gate_up_cut_in_halves",
    "transformers-neuronx#106": "tokens_rearranged",
    "Megatron-LM#5231": "tokens_rearranged",
    "vllm#58061": "ranks_add_other_tokens",
    "vllm-ascend#12642": "norm_mean_square_missing",
    "vllm#13474": "router_groups",
    "vllm#31478": "attention_soft_cap",
    "vllm#50761": "router_bias_low_precision + gate_up_swapped",
}
# Lookalikes of new names, and of those that were given wrongly: what each is taken for is no name of it.
UNNAMED = (
    "norms divide by n -8",
    "post_norm takes a power of 0.48",
    "scores: clamped at 1",
    "down: half of the rows × 0.9",
    "the next expert for the last",
    "expert numbers made even",
)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with open_runtime("cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    request = next(bench_names.list_requests(1, ()))
    with open_baseline(request, tmp_path_factory.mktemp("names")) as opened:
        yield opened


def name(plant: Plant, baseline: Baseline, runtime: Runtime, directory: Path) -> dict[str, NamedPort]:
    ports = bench_names.name_port(baseline, "reported", plant, runtime, directory)
    return {port.view: port for port in ports}


@pytest.mark.slow
@pytest.mark.parametrize("report", NAMED)
def test_port_of_a_report_is_named(report: str, baseline: Baseline, runtime: Runtime, tmp_path: Path) -> None:
    found = name(REPORTED[report], baseline, runtime, tmp_path)
    assert set(found["black box"].names) == {NAMED[report]}
    # Mistakes at different sites are explained one by one.
    assert set(found["sites"].names) == set(NAMED[report].split(" + "))


@pytest.mark.slow
@pytest.mark.parametrize("lookalike", UNNAMED)
def test_lookalike_is_found_and_not_named(
    lookalike: str, baseline: Baseline, runtime: Runtime, tmp_path: Path
) -> None:
    for port in name(LOOKALIKES[lookalike], baseline, runtime, tmp_path).values():
        assert port.blamed
        assert port.wrong == ()


def test_there_are_a_hundred_lookalikes_and_22_reports() -> None:
    assert len(REPORTED) == len(reported.PLANTS) == 22
    assert len(LOOKALIKES) == len(lookalikes.PLANTS) >= 100


def case(group: str, *names: str, akin: tuple[str, ...] = (), proved: tuple[str, ...] = ()) -> NamedPort:
    return NamedPort(
        group=group,
        mistake="a mistake",
        akin=("a mistake", *akin),
        model="a model",
        view="sites",
        blamed=("moe_delta",),
        unexplained=9.0,
        names=names,
        proved=proved,
    )


def test_wrong_names_and_proofs_of_them_are_counted() -> None:
    cases = [
        case("lookalikes"),
        case("lookalikes", "other", proved=("other",)),
        case("lookalikes", "true of it", akin=("true of it",)),
        case("lookalikes", "true of it + other", akin=("true of it",)),
    ]
    figures = {figure.figure: figure for figure in give_figures(cases)}
    assert figures["lookalikes, sites: wrong_names_%"].value == 50
    assert figures["lookalikes, sites: named_%"].value == 25
    assert not figures["lookalikes, sites: wrong_names_%"].holds
    assert not figures["lookalikes: wrong names proved"].holds
    assert all(figure.holds for figure in give_figures([case("lookalikes")]))
