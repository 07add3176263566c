"""Figures of planning: plans found, valid, and quick. Tests hold the planner `balanced` to the optimum.

A cluster is a tuple of nodes. To be sure that a plan exists, a cluster is drawn backwards: MiniMax-M2's 62 layers are
divided at random, and each node gets at least the memory of its part. The rival is the planner of exo, which runs
models on several home computers: it divides the layers by memory and then checks whether they fit.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from figures import Figure

from minimax_tools.checkpoint.expected_tensors import expected_tensors
from minimax_tools.errors import CannotRunError
from minimax_tools.model.architecture import Architecture
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.cost import ModelCost, PartCost, Workload, measure_costs
from minimax_tools.partition.node import MAX_NODES, Node, Stage
from minimax_tools.partition.planners import plan_stages
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import TokenIds

PLANNERS = ("memory", "balanced")
# A node has up to this much more memory than its part of the drawn division needs, as a share of that part: 4 % in a
# tight cluster, 800 % in a loose one. One cluster in 25 is tight. All this is chosen so that the rival rejects about a
# sixth of the clusters: nearly all tight ones of many nodes, and loose ones where its rounding does not fit.
_TIGHT_SLACK, _LOOSE_SLACK = 0.04, 8.0
_TIGHT_SHARE = 0.04
# Speeds of nodes in TFLOPS, as of several generations of GPUs.
_TFLOPS = (91.0, 125.0, 312.0, 989.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningScale:
    """Size of the measurement."""

    num_clusters: int  # number of clusters for MiniMax-M2
    balanced_every: int  # the planner `balanced`, which is slow, plans one of this many clusters
    num_times: int  # number of times that the largest plan is timed


SCALES: Mapping[str, PlanningScale] = {
    "full": PlanningScale(num_clusters=20_000, balanced_every=10, num_times=15),
    "toy": PlanningScale(num_clusters=60, balanced_every=10, num_times=3),
}


def measure(scale: str) -> Iterator[Figure]:
    """Yield the figures of planning."""
    cost = true_size_cost()
    yield from _measure_feasible(cost, SCALES[scale])
    yield from _measure_time(cost, SCALES[scale])


def true_size_cost() -> ModelCost:
    """Measure the cost of MiniMax-M2 in FP8, with 4096 tokens of context."""
    token_ids = TokenIds(bos_token_id=0, eos_token_id=0)
    config = SyntheticModel.m2().config(dtype=torch.float8_e4m3fn, token_ids=token_ids)
    return measure_costs(
        expected_tensors(ModelSpec.from_config(config)),
        Architecture.of("minimax_m2"),
        config,
        Workload(context_length=4096),
    )


def _measure_feasible(cost: ModelCost, scale: PlanningScale) -> Iterator[Figure]:
    rng = random.Random(0)
    num_found = num_planned = num_invalid = num_rejected = 0
    for number in range(scale.num_clusters):
        nodes = draw_cluster(cost, rng)
        num_rejected += not rival_fits(cost, nodes)
        for planner in PLANNERS if number % scale.balanced_every == 0 else PLANNERS[:1]:
            num_planned += 1
            try:
                stages = plan_stages(planner, cost, nodes)
            except CannotRunError:
                continue
            num_found += 1
            num_invalid += not is_valid(cost, nodes, stages)
    yield Figure.exactly("feasible_plans_found", num_found / num_planned, 1)
    yield Figure.exactly("invalid_plans", num_invalid, 0)
    yield Figure.plain("clusters", scale.num_clusters)
    yield Figure.plain("rival_rejected_share", num_rejected / scale.num_clusters)


def draw_cluster(cost: ModelCost, rng: random.Random) -> tuple[Node, ...]:
    """Draw 1 to 64 nodes that can hold the model, in any order; small clusters are as likely as large ones."""
    num_layers = len(cost.layers)
    # The logarithm of the number is uniform.
    num_nodes = min(round(math.exp(rng.uniform(0, math.log(MAX_NODES + 1)))), MAX_NODES)
    slack = _TIGHT_SLACK if rng.random() < _TIGHT_SHARE else _LOOSE_SLACK
    # In the drawn division each node holds at least one layer. Nodes beyond the 62nd hold none.
    num_holders = min(num_nodes, num_layers)
    bounds = sorted(rng.sample(range(1, num_layers), num_holders - 1))
    memories = []
    for position, (start, stop) in enumerate(zip([0, *bounds], [*bounds, num_layers], strict=True)):
        part = cost.of_slice(
            range(start, stop), has_embedding=position == 0, has_head=position == num_holders - 1
        )
        memories.append(math.ceil(part.memory_bytes * (1 + rng.random() * slack)))
    # These nodes need no memory: they get any.
    memories += [rng.randint(10**9, 10**10) for _ in range(num_nodes - num_holders)]
    rng.shuffle(memories)
    return tuple(
        Node(name=f"node{number}", memory_bytes=memory, tflops=rng.choice(_TFLOPS))
        for number, memory in enumerate(memories)
    )


def rival_fits(cost: ModelCost, nodes: Sequence[Node]) -> bool:
    """Decide whether each node can hold the layers that exo's rule gives it.

    The rule gives layers in proportion to memory, to the largest nodes first. Shares are rounded down, and the layers
    left go to the largest fractions. A node that still has no layer takes one from the node with the most.
    """
    num_layers = len(cost.layers)
    if len(nodes) > num_layers:
        return False
    order = sorted(nodes, key=lambda node: (node.memory_bytes, node.name), reverse=True)
    total = sum(node.memory_bytes for node in order)
    shares = [node.memory_bytes * num_layers / total for node in order]
    counts = [int(share) for share in shares]
    by_fraction = sorted(range(len(order)), key=lambda position: shares[position] % 1, reverse=True)
    for position in by_fraction[: num_layers - sum(counts)]:
        counts[position] += 1
    for position in range(len(counts)):
        if counts[position] == 0:
            counts[counts.index(max(counts))] -= 1
            counts[position] = 1
    start = 0
    for position, (node, count) in enumerate(zip(order, counts, strict=True)):
        part = cost.of_slice(
            range(start, start + count), has_embedding=position == 0, has_head=position == len(order) - 1
        )
        if part.memory_bytes > node.memory_bytes:
            return False
        start += count
    return True


def is_valid(cost: ModelCost, nodes: Sequence[Node], stages: Sequence[Stage]) -> bool:
    """Decide whether a plan holds all layers once and in order, within the memory of each node."""
    layers = [layer for stage in stages for layer in stage.layers]
    used = [stage for stage in stages if stage.is_used]
    fits = all(_cost_of(stage, cost).memory_bytes <= stage.node.memory_bytes for stage in stages)
    return (
        fits
        and layers == list(range(len(cost.layers)))
        and Counter(stage.node.name for stage in stages) == Counter(node.name for node in nodes)
        and [stage.has_embedding for stage in used] == [True] + [False] * (len(used) - 1)
        and [stage.has_head for stage in used] == [False] * (len(used) - 1) + [True]
    )


def _cost_of(stage: Stage, cost: ModelCost) -> PartCost:
    return cost.of_slice(stage.layers, has_embedding=stage.has_embedding, has_head=stage.has_head)


def _measure_time(cost: ModelCost, scale: PlanningScale) -> Iterator[Figure]:
    rng = random.Random(2)
    nodes = [
        Node(name=f"node{number}", memory_bytes=rng.randint(10, 80) * 10**9, tflops=rng.choice(_TFLOPS))
        for number in range(MAX_NODES)
    ]
    medians = {}
    for planner in PLANNERS:
        times = []
        for _ in range(scale.num_times):
            began_s = time.perf_counter()
            plan_stages(planner, cost, nodes)
            times.append(time.perf_counter() - began_s)
        medians[planner] = statistics.median(times) * 1e3
    yield Figure.at_most("plan_62_layers_64_nodes_ms", max(medians.values()), 50)
    for planner, milliseconds in medians.items():
        yield Figure.plain(f"plan_62_layers_64_nodes_{planner}_ms", milliseconds)
