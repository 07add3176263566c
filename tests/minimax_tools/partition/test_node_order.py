from __future__ import annotations

import random
from itertools import accumulate

import pytest

from minimax_tools.partition.cost import ModelCost, PartCost, Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.node_order import NodeChain, count_room, divide, find_order


def chain_of(*sizes: int, embedding: int = 50, head: int = 30) -> NodeChain:
    return NodeChain(
        ModelCost(
            embedding=PartCost(loaded_bytes=embedding, activation_bytes=1),
            layers=tuple(
                PartCost(loaded_bytes=size, activation_bytes=4, flops_per_token=size * 10**9)
                for size in sizes
            ),
            final_norm=PartCost(),
            lm_head=PartCost(loaded_bytes=head, activation_bytes=9, flops_per_token=25 * 10**9),
            workload=Workload(context_length=1),
        )
    )


def node(memory: int, *, tflops: float = 1.0) -> Node:
    return Node(name=f"m{memory}", memory_bytes=memory, tflops=tflops)


def test_reach_is_the_longest_run_that_fits() -> None:
    chain = chain_of(10, 20, 30, 40)
    assert [chain.reach(node(54), start) for start in range(5)] == [2, 3, 3, 4, 4]
    assert chain.reach(node(64), 0) == 3
    assert chain.reach(node(63), 0) == 2


def test_reach_charges_for_embedding_head_and_activations() -> None:
    chain = chain_of(10, 20, 30, 40)
    assert chain.reach(node(50 + 30 + 4), 0, chain.cost.embedding) == 2
    assert chain.reach(node(30 + 40 + 9), 3, chain.cost.head) == 4
    assert chain.reach(node(30 + 40 + 8), 3, chain.cost.head) == 3
    assert chain.reach(node(50 + 30 + 100 + 9), 0, *chain.ends(1)) == 4


def test_reach_is_minus_one_where_the_ends_do_not_fit() -> None:
    chain = chain_of(10, 20)
    assert chain.reach(node(51), 0, chain.cost.embedding) == 0
    assert chain.reach(node(50), 0, chain.cost.embedding) == -1
    assert chain.reach(node(38), 2, chain.cost.head) == -1
    assert chain.reach_back(node(50), 2, chain.cost.embedding) == 3


def test_time_limits_reach_too() -> None:
    chain = chain_of(10, 20, 30, 40)
    fast = node(1000, tflops=2.0)
    # A layer of 20 GFLOPs takes 10 ms at 2 TFLOPs a second.
    assert chain.within(0.0299).reach(fast, 0) == 2
    assert chain.within(0.0301).reach(fast, 0) == 3
    assert chain.within(0.0324).reach(fast, 3, chain.cost.head) == 3
    assert chain.within(0.0326).reach(fast, 3, chain.cost.head) == 4
    assert chain.within(0.01).reach(fast, 4, chain.cost.head) == -1
    assert chain.seconds(fast, range(1, 3), chain.cost.head) == pytest.approx(0.0375)


def test_reaching_back_agrees_with_reaching_on() -> None:
    rng = random.Random(0)
    for _ in range(300):
        chain = chain_of(*(rng.randint(1, 30) for _ in range(rng.randint(1, 9))))
        ends = chain.cost.of_slice(range(0), has_embedding=rng.random() < 0.3, has_head=rng.random() < 0.3)
        seconds = rng.choice((None, rng.uniform(0, 0.2)))
        chain = chain if seconds is None else chain.within(seconds)
        machine = node(rng.randint(1, 250), tflops=rng.uniform(0.1, 3))
        for stop in range(chain.num_layers + 1):
            start = chain.reach_back(machine, stop, ends)
            reaching = [first for first in range(stop + 1) if chain.reach(machine, first, ends) >= stop]
            assert reaching == list(range(start, stop + 1))


def test_given_order_is_kept_where_it_will_do() -> None:
    chain = chain_of(*[10] * 6)
    nodes = [node(90), node(25), node(85)]
    assert find_order(chain, nodes) == tuple(nodes)


def test_ends_are_changed_where_only_that_helps() -> None:
    # Only the last has room for the embedding beside a layer.
    chain = chain_of(*[10] * 6, embedding=200, head=0)
    nodes = [node(49), node(29), node(219)]
    order = find_order(chain, nodes)
    assert order is not None
    assert order[0] == nodes[2]
    assert count_room(chain, nodes) == 7
    assert count_room(chain, nodes[:2]) == -1


def test_idle_nodes_stand_between_those_that_are_needed() -> None:
    chain = chain_of(30, 10, 10, embedding=0, head=0)
    nodes = [node(19), node(30), node(15), node(38)]
    order = find_order(chain, nodes)
    assert order is not None
    assert sorted(order, key=str) == sorted(nodes, key=str)
    assert order != tuple(nodes)
    assert find_order(chain, order) == order


def test_division_keeps_as_near_to_the_targets_as_nodes_allow() -> None:
    chain = chain_of(*[10] * 6)
    order = [node(200), node(44), node(200)]
    assert divide(chain, order, [2.0, 4.0, 6.0]) == (range(2), range(2, 4), range(4, 6))
    assert divide(chain, order, [1.4, 6.0, 6.0]) == (range(1), range(1, 5), range(5, 6))
    assert divide(chain, order, [0.0, 0.0, 6.0]) == (range(1), range(1, 2), range(2, 6))


def test_division_leaves_no_layer_for_those_who_cannot_take_it() -> None:
    chain = chain_of(*[10] * 6, head=30)
    order = [node(200), node(14), node(49)]
    for targets in ([0.0, 0.0, 6.0], [6.0, 6.0, 6.0], [3.0, 3.0, 6.0]):
        runs = divide(chain, order, targets)
        assert list(accumulate(map(len, runs))) == [run.stop for run in runs]
        assert len(runs[1]) == 1
        assert len(runs[2]) == 1
