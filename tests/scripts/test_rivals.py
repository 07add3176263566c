"""Rivals are what they are said to be: exo's rule and the seeds' figures."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_compare
from slices import planning

from minimax_tools.metrics.pair_metrics import compare_tensors
from minimax_tools.partition.cost import ModelCost, PartCost, Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.planners import plan_stages


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


def test_seeds_figures_and_mm2s_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(40, 4096, generator=generator)
    target = reference + 0.01 * torch.randn(40, 4096, generator=generator)
    seed = bench_compare.seed_figures(reference, target)
    ours = compare_tensors(reference, target, rtol=bench_compare.RTOL, atol=bench_compare.ATOL)
    assert seed["distance"][:2] == pytest.approx((ours.max_abs_diff, ours.mean_abs_diff), rel=1e-5)
    # The seeds' tolerance is relative to the target.
    assert seed["close"] == pytest.approx(ours.close_fraction, abs=1e-3)
    assert seed["cosine"] == pytest.approx(ours.cosine_similarity, abs=1e-5)
    assert seed["pearson"] == pytest.approx(ours.pearson_correlation, abs=1e-5)


def test_what_is_no_plan_is_invalid() -> None:
    cost, nodes = model_of(1, 1, 1), (node("a", 250), node("b", 250))
    first, second = stages = plan_stages("memory", cost, nodes)
    assert planning.is_valid(cost, nodes, stages)
    for wrong in (
        (second, first),
        (first,),
        (replace(first, layers=range(0)), second),
        (replace(first, node=node("a", 50)), second),
        (replace(first, has_embedding=False), second),
    ):
        assert not planning.is_valid(cost, nodes, wrong)


def test_clusters_are_drawn_so_that_a_division_fits() -> None:
    cost, rng = planning.true_size_cost(), random.Random(3)
    for _ in range(10):
        nodes = planning.draw_cluster(cost, rng)
        assert planning.is_valid(cost, nodes, plan_stages("memory", cost, nodes))


def test_exo_divides_by_memory_and_then_looks_whether_that_fits() -> None:
    cost = model_of(1, 1, 1, 1)
    assert planning.rival_fits(cost, (node("a", 300), node("b", 300)))
    # Two layers each by memory; with the embedding the first has room for one of them and a bit.
    assert not planning.rival_fits(cost, (node("a", 205), node("b", 205)))
    # Shares of 2.6, 2.5 and 0.9 become 3, 2 and 1. With one layer each to begin with, they would be 2, 2 and 2.
    nodes = (node("a", 390), node("b", 375), node("c", 135))
    assert planning.rival_fits(model_of(1, 1, 1, 1, 1, 1), nodes)
