from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest

from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import ModelCost, PartCost, Workload
from minimax_tools.partition.node import Node, Stage
from minimax_tools.partition.planners import PLANNERS, plan_stages

DIVIDING = ("memory", "balanced")
LAYER = PartCost(loaded_bytes=90, kv_bytes=10, activation_bytes=7, flops_per_token=10**9)
EMBEDDING = PartCost(loaded_bytes=20, activation_bytes=2)
LM_HEAD = PartCost(loaded_bytes=30, activation_bytes=9, flops_per_token=3 * 10**8)
NOTHING = PartCost()


def model(
    layers: Sequence[PartCost] = (LAYER,) * 8,
    *,
    embedding: PartCost = EMBEDDING,
    lm_head: PartCost = LM_HEAD,
    shared: PartCost = NOTHING,
) -> ModelCost:
    return ModelCost(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=PartCost(loaded_bytes=1),
        lm_head=lm_head,
        shared=shared,
        is_tied=shared != NOTHING,
        workload=Workload(context_length=1),
    )


def cluster(*memory: int, tflops: Sequence[float] | None = None) -> tuple[Node, ...]:
    speeds = tflops or [1.0] * len(memory)
    return tuple(
        Node(name=f"n{number}", memory_bytes=size, tflops=speed)
        for number, (size, speed) in enumerate(zip(memory, speeds, strict=True))
    )


def chosen(memory: int, **spans: tuple[int, int]) -> tuple[Node, ...]:
    """Nodes with layers of their own choice."""
    return tuple(Node(name=name, memory_bytes=memory, layers=Span(*span)) for name, span in spans.items())


def counts(stages: Sequence[Stage]) -> dict[str, int]:
    return {stage.node.name: len(stage.layers) for stage in stages}


def memory_of(cost: ModelCost, layers: range, *, is_first: bool, is_last: bool) -> int:
    """By hand, from the parts themselves."""
    parts = [cost.layers[layer] for layer in layers]
    parts += [cost.embedding] * is_first + [cost.final_norm, cost.lm_head] * is_last
    held = sum(part.loaded_bytes + part.kv_bytes for part in parts)
    if is_first and is_last:
        held -= cost.shared.loaded_bytes
    return held + max((part.activation_bytes for part in parts), default=0)


def seconds_of(cost: ModelCost, node: Node, layers: range, *, is_last: bool) -> float:
    flops = (
        sum(cost.layers[layer].flops_per_token for layer in layers) + is_last * cost.lm_head.flops_per_token
    )
    return flops / (1e12 * (node.tflops or 1.0))


def divisions(cost: ModelCost, nodes: Sequence[Node]) -> Iterator[float]:
    """Seconds of the slowest stage of every division that fits: any of the nodes, in any order, in runs that meet."""
    num_layers = len(cost.layers)

    def extend(start: int, free: tuple[Node, ...], slowest: float) -> Iterator[float]:
        is_first = len(free) == len(nodes)
        for node in free:
            for stop in range(start, num_layers + 1):
                layers = range(start, stop)
                if memory_of(cost, layers, is_first=is_first, is_last=False) <= node.memory_bytes:
                    others = tuple(other for other in free if other is not node)
                    so_far = max(slowest, seconds_of(cost, node, layers, is_last=False))
                    # A node in between without a layer is one that was left out.
                    if layers or is_first:
                        yield from extend(stop, others, so_far)
                if stop == num_layers and (
                    memory_of(cost, layers, is_first=is_first, is_last=True) <= node.memory_bytes
                ):
                    yield max(slowest, seconds_of(cost, node, layers, is_last=True))

    yield from extend(0, tuple(nodes), 0.0)


def assert_valid(cost: ModelCost, nodes: Sequence[Node], stages: Sequence[Stage]) -> None:
    assert sorted(stage.node.name for stage in stages) == sorted(node.name for node in nodes)
    assert [layer for stage in stages for layer in stage.layers] == list(range(len(cost.layers)))
    used = [stage for stage in stages if stage.is_used]
    assert [stage.has_embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage for stage in stages if stage.has_head] == [used[-1]]
    assert list(stages[: len(used)]) == used
    for stage in used:
        needed = memory_of(cost, stage.layers, is_first=stage.has_embedding, is_last=stage.has_head)
        assert needed <= stage.node.memory_bytes, stage


def draw(
    rng: random.Random, *, is_uniform: bool, max_nodes: int, max_layers: int
) -> tuple[ModelCost, tuple[Node, ...]]:
    num_layers, num_nodes = rng.randint(1, max_layers), rng.randint(1, max_nodes)
    kinds = [
        PartCost(
            loaded_bytes=rng.randint(20, 150),
            kv_bytes=rng.randint(0, 20),
            activation_bytes=8,
            flops_per_token=rng.randint(1, 40) * 10**8,
        )
        for _ in range(1 if is_uniform else 3)
    ]
    embedding_bytes = rng.randint(0, 200)
    cost = model(
        rng.choices(kinds, k=num_layers),
        embedding=PartCost(loaded_bytes=embedding_bytes, activation_bytes=rng.randint(0, 20)),
        lm_head=PartCost(
            loaded_bytes=rng.randint(0, 200),
            activation_bytes=rng.randint(0, 40),
            flops_per_token=rng.randint(0, 30) * 10**8,
        ),
    )
    if rng.random() < 0.2:
        tied = PartCost(loaded_bytes=embedding_bytes)
        cost = model(cost.layers, embedding=cost.embedding, lm_head=tied, shared=tied)
    mean = cost.whole.memory_bytes / num_nodes
    nodes = cluster(
        *(int(mean * rng.uniform(0.5, 1.9)) + 1 for _ in range(num_nodes)),
        tflops=[rng.choice((0.5, 1.0, 3.0, 7.5)) for _ in range(num_nodes)],
    )
    return cost, nodes


@pytest.mark.parametrize("is_uniform", [True, False])
def test_plan_is_found_exactly_where_there_is_one_and_balanced_is_the_optimum(is_uniform: bool) -> None:
    rng = random.Random(4)
    num_feasible = 0
    for number in range(200):
        max_nodes, max_layers = (5, 8) if number % 40 == 0 else (4, 5)
        cost, nodes = draw(rng, is_uniform=is_uniform, max_nodes=max_nodes, max_layers=max_layers)
        optimum = min(divisions(cost, nodes), default=math.inf)
        num_feasible += optimum < math.inf
        for planner in DIVIDING:
            if optimum == math.inf:
                with pytest.raises(CannotRunError):
                    plan_stages(planner, cost, nodes)
                continue
            stages = plan_stages(planner, cost, nodes)
            assert_valid(cost, nodes, stages)
            if planner == "balanced":
                seconds = [
                    seconds_of(cost, stage.node, stage.layers, is_last=stage.has_head) for stage in stages
                ]
                assert max(seconds) == pytest.approx(optimum, rel=1e-8, abs=0)
    assert 60 < num_feasible < 170


@pytest.mark.parametrize("planner", DIVIDING)
@pytest.mark.parametrize("is_uniform", [True, False])
def test_order_in_which_nodes_are_given_makes_no_difference(planner: str, is_uniform: bool) -> None:
    rng = random.Random(5)
    for _ in range(6):
        cost, nodes = draw(rng, is_uniform=is_uniform, max_nodes=3, max_layers=7)
        # Nodes that differ in name alone are what ties are made of.
        nodes = cluster(*(node.memory_bytes + 400 for node in nodes + nodes))
        stages = plan_stages(planner, cost, nodes)
        for _ in range(3):
            assert plan_stages(planner, cost, rng.sample(nodes, len(nodes))) == stages


@pytest.mark.parametrize("planner", DIVIDING)
@pytest.mark.parametrize("slack", [0, 60])
def test_64_nodes_of_different_sizes_share_many_layers_as_tight_as_they_may_be(
    planner: str, slack: int
) -> None:
    rng = random.Random(6)
    runs = [rng.randint(1, 4) for _ in range(64)]
    cost = model([LAYER] * sum(runs))
    ends = {0: 20, 63: 31 + 2}
    memory = [100 * run + 7 + ends.get(place, 0) + rng.randint(0, slack) for place, run in enumerate(runs)]
    nodes = cluster(*memory, tflops=[rng.uniform(1, 9) for _ in memory])
    shuffled = rng.sample(nodes, len(nodes))
    assert_valid(cost, shuffled, plan_stages(planner, cost, shuffled))


TIED = PartCost(loaded_bytes=20)


@pytest.mark.parametrize("planner", DIVIDING)
@pytest.mark.parametrize(
    ("cost", "needed"),
    [
        (model(), 8 * 100 + 20 + 31 + 9),
        (model(embedding=TIED, lm_head=TIED, shared=TIED), 8 * 100 + 20 + 1 + 7),
    ],
    ids=["own lm_head", "a tied matrix counts once"],
)
def test_one_node_holds_everything(planner: str, cost: ModelCost, needed: int) -> None:
    (stage,) = plan_stages(planner, cost, cluster(needed))
    assert (stage.layers, stage.has_embedding, stage.has_head) == (range(8), True, True)
    with pytest.raises(CannotRunError, match="1 node cannot hold the model"):
        plan_stages(planner, cost, cluster(needed - 1))


@pytest.mark.parametrize("planner", DIVIDING)
def test_more_nodes_than_layers_leaves_the_last_idle(planner: str) -> None:
    cost = model([LAYER] * 3)
    stages = plan_stages(planner, cost, cluster(*[1000] * 6))
    assert_valid(cost, cluster(*[1000] * 6), stages)
    # The fastest pipeline has the head apart.
    num_used = 4 if planner == "balanced" else 3
    assert [stage.is_used for stage in stages] == [True] * num_used + [False] * (6 - num_used)
    assert max(counts(stages).values()) == 1


HEAVY = PartCost(loaded_bytes=400)
BARE = model([LAYER] * 62, embedding=NOTHING, lm_head=NOTHING)
HEAVY_ENDS = model([LAYER] * 12, embedding=HEAVY, lm_head=HEAVY)
NO_HEAD = model([LAYER] * 10, lm_head=NOTHING)
# By memory 4 of 6 layers would go to the first node, which has room for 3; exo's new rule refuses such clusters.
UNEVEN = model([LAYER] * 6, embedding=PartCost(loaded_bytes=90), lm_head=NOTHING)
# Its embedding fits one of two nodes alone, without a layer.
LARGE_EMBEDDING = model([LAYER] * 2, embedding=PartCost(loaded_bytes=500, activation_bytes=2))
SMALL = cluster(240, 505)
OF_TWO_SPEEDS = cluster(*[10**6] * 3, tflops=[100, 100, 1])
DIVISIONS = {
    "the largest first": (
        "memory",
        BARE,
        cluster(16_000, 64_000, 32_000, 64_000),
        {"n3": 23, "n1": 22, "n2": 11, "n0": 6},
    ),
    "ends count": ("memory", HEAVY_ENDS, cluster(*[2000] * 4), {"n3": 1, "n2": 5, "n1": 5, "n0": 1}),
    # exo's old rule rounds shares to five digits and cuts there: a node of 1 in 100 gets no layer of 62.
    "none lost": (
        "memory",
        model([LAYER] * 62),
        cluster(50_000, 49_000, 1_000),
        {"n0": 31, "n1": 30, "n2": 1},
    ),
    "not by share": ("memory", UNEVEN, cluster(90 + 399 + 7, 1 + 307 + 7), {"n0": 3, "n1": 3}),
    "too small": ("memory", model(), cluster(600, 50, 600, 106), {"n2": 4, "n0": 4, "n3": 0, "n1": 0}),
    "embedding alone, by memory": ("memory", LARGE_EMBEDDING, SMALL, {"n1": 0, "n0": 2}),
    "embedding alone, balanced": ("balanced", LARGE_EMBEDDING, SMALL, {"n1": 0, "n0": 2}),
    "slow node left out": ("balanced", NO_HEAD, OF_TWO_SPEEDS, {"n1": 5, "n0": 5, "n2": 0}),
    "balanced keeps to memory": (
        "balanced",
        NO_HEAD,
        cluster(10**6, 230, tflops=[1, 100]),
        {"n1": 2, "n0": 8},
    ),
    "manual": ("manual", model(), chosen(1000, b=(3, 8), a=(0, 3)), {"a": 3, "b": 5}),
}


@pytest.mark.parametrize(("planner", "cost", "nodes", "expected"), DIVISIONS.values(), ids=DIVISIONS)
def test_layers_are_divided_so(
    planner: str, cost: ModelCost, nodes: tuple[Node, ...], expected: dict[str, int]
) -> None:
    stages = plan_stages(planner, cost, nodes)
    assert list(counts(stages).items()) == list(expected.items())
    assert_valid(cost, nodes, stages)


@pytest.mark.parametrize(
    "spans", [[(0, 3), (4, 8)], [(0, 4), (3, 8)], [(1, 8)], [(0, 7)], [(0, 9)], [(0, 8), (0, 8)]]
)
def test_manual_layers_that_are_not_the_models_are_refused(spans: list[tuple[int, int]]) -> None:
    nodes = chosen(10**6, **dict(zip("ab", spans, strict=False)))
    fault = "do not cover each layer of the model once: expected runs that meet, from layer 0 to 7"
    with pytest.raises(UsageError, match=fault):
        plan_stages("manual", model(), nodes)


def test_manual_names_every_node_that_its_layers_do_not_fit() -> None:
    with pytest.raises(CannotRunError, match="a needs 327 B and has 300 B; c needs 340 B and has 300 B"):
        plan_stages("manual", model(), chosen(300, a=(0, 3), b=(3, 5), c=(5, 8)))


def test_planners_say_which_nodes_do_not_say_what_they_need() -> None:
    nodes = [*cluster(1000), Node(name="x", memory_bytes=1000), Node(name="y", memory_bytes=1000)]
    with pytest.raises(UsageError, match="needs each node's throughput: found none for x; y"):
        plan_stages("balanced", model(), nodes)
    with pytest.raises(UsageError, match="needs each node's layers: found none for n0; x; y"):
        plan_stages("manual", model(), nodes)
    assert len(plan_stages("memory", model(), nodes)) == 3
    with pytest.raises(UsageError, match="no planner 'best': expected one of " + ", ".join(PLANNERS)):
        plan_stages("best", model(), nodes)


@pytest.mark.parametrize(
    ("memory", "missing"),
    [
        ((500, 300), "800 B in all, 58 B too little"),
        ((410, 410, 100), "does not fit in any order of the nodes"),
        ((15, 15, 10), "no node has the 22 B that the embedding takes; no node has the 40 B that the head"),
    ],
)
def test_cluster_that_cannot_hold_the_model_is_told_what_is_missing(
    memory: tuple[int, ...], missing: str
) -> None:
    with pytest.raises(CannotRunError, match=f"{len(memory)} nodes cannot hold the model.*{missing}"):
        plan_stages("memory", model(), cluster(*memory))
