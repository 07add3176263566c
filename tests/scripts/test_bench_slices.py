from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_slices
from slices import planning

from minimax_tools.errors import CannotRunError
from minimax_tools.partition.cost import ModelCost, PartCost, Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.planners import plan_stages

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_slices.py"
NAMED_IN_THE_ISSUE = {
    "feasible_plans_found",
    "invalid_plans",
    "slowest_stage_over_optimum",
    "plan_62_layers_64_nodes_ms",
    "extract_over_cp",
    "extract_peak_anonymous_mb",
    "bytes_read_over_slice",
    "two_ranks_over_one",
}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), "--scale", "toy", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def figures_of(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, float]]:
    record = json.loads(result.stdout)
    assert record["benchmark"] == "slices"
    return {figure["figure"]: figure for figure in record["figures"]}


def model_of(*flops: int) -> ModelCost:
    """Layers of 100 bytes each, and of so many FLOPs."""
    return ModelCost(
        embedding=PartCost(loaded_bytes=10),
        layers=tuple(PartCost(loaded_bytes=100, flops_per_token=each * 10**12) for each in flops),
        final_norm=PartCost(),
        lm_head=PartCost(loaded_bytes=10),
        workload=Workload(context_length=1),
    )


def node(name: str, memory_bytes: int, tflops: float = 1.0) -> Node:
    return Node(name=name, memory_bytes=memory_bytes, tflops=tflops)


def test_every_figure_of_the_issue_has_a_group() -> None:
    assert {name for names in bench_slices.GROUPS.values() for name in names} == NAMED_IN_THE_ISSUE


@pytest.mark.parametrize("group", ["planning", pytest.param("extracting", marks=pytest.mark.slow)])
def test_a_group_is_measured_and_its_goals_are_held(group: str) -> None:
    result = run("--only", group, "--json")
    figures = figures_of(result)
    assert set(bench_slices.GROUPS[group]) <= set(figures)
    for exact, value in (("feasible_plans_found", 1), ("invalid_plans", 0)):
        if group == "planning":
            assert figures[exact]["value"] == value
    assert result.returncode == (0 if all(figure["holds"] for figure in figures.values()) else 1)


@pytest.mark.slow
def test_runs_along_a_plan_are_measured() -> None:
    figures = figures_of(run("--only", "two_ranks_over_one", "--json"))
    assert figures["bytes_read_over_slice"]["value"] == 1
    assert figures["two_ranks_over_one"]["value"] > 0


def test_an_unknown_figure_is_wrong_usage() -> None:
    result = run("--only", "extract")
    assert result.returncode == 2
    assert "no figure extract: choose of" in result.stderr


def test_what_is_no_plan_is_invalid() -> None:
    cost, nodes = model_of(1, 1, 1), (node("a", 250), node("b", 250))
    stages = plan_stages("memory", cost, nodes)
    assert planning.is_valid(cost, nodes, stages)
    first, second = stages
    for wrong in (
        (second, first),
        (first,),
        (replace(first, layers=range(0)), second),
        (replace(first, node=node("a", 50)), second),
        (replace(first, has_embedding=False), second),
        (first, replace(second, has_head=False)),
    ):
        assert not planning.is_valid(cost, nodes, wrong)


def test_the_optimum_is_the_least_over_all_orders_and_divisions() -> None:
    cost = model_of(4, 1, 1)
    # The fast one takes the first layer, the slow one the two others: 2 s each. All on the fast one would take 3 s.
    assert planning.find_optimum(cost, (node("slow", 1000), node("fast", 1000, 2.0))) == 2.0
    assert planning.find_optimum(cost, (node("slow", 1000), node("fast", 120, 2.0))) == 2.0
    assert math.isinf(planning.find_optimum(cost, (node("slow", 120), node("fast", 120, 2.0))))


def test_clusters_are_drawn_so_that_a_division_fits() -> None:
    cost, rng = planning.true_size_cost(), random.Random(3)
    for _ in range(20):
        nodes = planning.draw_cluster(cost, rng)
        stages = plan_stages("memory", cost, nodes)
        assert planning.is_valid(cost, nodes, stages)


def test_the_rival_divides_by_memory_and_then_looks_whether_that_fits() -> None:
    cost = model_of(1, 1, 1, 1)
    assert planning.rival_fits(cost, (node("a", 300), node("b", 300)))
    # Two layers each by memory; with the embedding the first has room for one of them and a bit.
    assert not planning.rival_fits(cost, (node("a", 205), node("b", 205)))
    assert not planning.rival_fits(cost, tuple(node(name, 500) for name in "abcde"))


def test_the_rival_gives_a_layer_at_least_after_it_has_rounded() -> None:
    # Shares of 2.6, 2.5 and 0.9 become 3, 2 and 1. With one layer each to begin with, they would be 2, 2 and 2.
    nodes = (node("a", 390), node("b", 375), node("c", 135))
    assert planning.rival_fits(model_of(1, 1, 1, 1, 1, 1), nodes)
    # A node without a share takes a layer from the largest one.
    assert planning.rival_fits(model_of(1, 1, 1), (node("a", 3000), node("b", 110)))


def test_a_planner_that_finds_no_plan_misses_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_nothing(*_: object) -> None:
        raise CannotRunError("no plan")

    monkeypatch.setattr(planning, "plan_stages", plan_nothing)
    slowest = next(planning._measure_optimum(planning.SCALES["toy"]))
    assert (slowest.value, slowest.holds) == (math.inf, False)
