"""Orders of nodes that can share all layers of a `NodeChain`, and the run of each node in an order.

A run is a range of layers; the ends are embedding and head. `chain.reach(node, start, ends)` is the layer behind the
longest run from `start` that the node can hold beside its `ends`: `start` if no layer fits, -1 if the ends do not.
`chain.memory[n]` and `chain.flops[n]` are sums over the first n layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minimax_tools.partition.chain import NO_ENDS, NodeChain
from minimax_tools.partition.cost import PartCost
from minimax_tools.partition.node import Node

# Most (set of nodes, next node) pairs that `_order_by_sets` tries for each size of set. It trades completeness for
# time: 10 different nodes have at most 252 sets of one size (10 choose 5), so all of these are tried.
_MAX_STEPS = 10 * 252


def find_order(chain: NodeChain, nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """Return an order of the nodes that can share all layers, close to the given one; None if none was found.

    The first node needs room for the embedding, the last one for the head. If all layers cost the same, as in
    MiniMax-M2, only the choice of these two matters, and the search is complete. If layers differ, the whole order
    matters: the search is complete for up to 10 nodes or more nodes of few kinds, and else tries the most promising
    orders. If no order works, the first node that can hold the whole model is returned alone.
    """
    if _covers(chain, nodes):
        return tuple(nodes)
    order = _order_uniform(chain, nodes) if chain.is_uniform else _order_by_sets(chain, nodes)
    if order is not None:
        return order
    for node in nodes:
        if _covers(chain, (node,)):
            return (node,)
    return None


def divide(chain: NodeChain, order: Sequence[Node], targets: Sequence[float]) -> tuple[range, ...]:
    """Return the run of each node, with ends as close to the targets as memory and time allow.

    Args:
        chain: The layers.
        order: The nodes, in an order that `find_order` found.
        targets: For each node, the layer before which its run should end; may be fractional.
    """
    all_ends = chain.ends(len(order))
    latest_starts = _latest_starts(chain, order)
    runs: list[range] = []
    start = 0
    for position, (node, ends, target) in enumerate(zip(order, all_ends, targets, strict=True)):
        stop = round(target)
        if len(order) <= chain.num_layers:
            # There are enough layers to give each node at least one.
            stop = min(max(stop, start + 1), chain.num_layers - (len(order) - position - 1))
        # The nodes behind this one must be able to take the rest.
        stop = max(stop, latest_starts[position + 1], start)
        stop = min(stop, chain.reach(node, start, ends))
        runs.append(range(start, stop))
        start = stop
    assert start == chain.num_layers, "the order was found to cover all layers"
    return tuple(runs)


def count_room(chain: NodeChain, nodes: Sequence[Node]) -> int:
    """Return the number of layers that fit two or more nodes in the best order, if all layers cost the same.

    Returns:
        The number, or -1 if no two nodes have room for embedding and head.
    """
    ends = _choose_ends(chain, nodes)
    return -1 if ends is None else ends.num_layers


def _covers(chain: NodeChain, order: Sequence[Node]) -> bool:
    stop = 0
    for node, ends in zip(order, chain.ends(len(order)), strict=True):
        stop = chain.reach(node, stop, ends)
        if stop < 0:
            return False
    return stop == chain.num_layers


def _latest_starts(chain: NodeChain, order: Sequence[Node]) -> list[int]:
    """Return for each node the first layer from which it and the nodes behind it can hold all; then `num_layers`."""
    starts = [chain.num_layers]
    for node, ends in zip(reversed(order), reversed(chain.ends(len(order))), strict=True):
        starts.append(chain.reach_back(node, starts[-1], ends))
    return starts[::-1]


def _order_uniform(chain: NodeChain, nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """Return an order for layers that cost the same: the best first and last node, the others as they come."""
    ends = _choose_ends(chain, nodes)
    if ends is None or ends.num_layers < chain.num_layers:
        return None
    between = (node for position, node in enumerate(nodes) if position not in (ends.first, ends.last))
    return (nodes[ends.first], *between, nodes[ends.last])


class _Ends(NamedTuple):
    """A choice of the nodes that hold embedding and head."""

    num_layers: int  # number of layers that fit all nodes, given this choice
    first: int  # position of the node with the embedding
    last: int  # position of the node with the head


def _choose_ends(chain: NodeChain, nodes: Sequence[Node]) -> _Ends | None:
    """Choose the first and the last node so that most layers fit; None if no two nodes have the room."""
    # All layers cost the same here, so as many fit a node anywhere as from layer 0.
    reaches = [chain.reach(node, 0) for node in nodes]
    first_losses = _layers_lost(chain, nodes, reaches, chain.cost.embedding)
    last_losses = _layers_lost(chain, nodes, reaches, chain.cost.head)
    # The least loss wins; among equals, the foremost node as the first and the hindmost (-position) as the last. Two
    # candidates for each end suffice: the best node may be the best for both ends, but can take only one.
    firsts = sorted(first_losses, key=lambda position: (first_losses[position], position))[:2]
    lasts = sorted(last_losses, key=lambda position: (last_losses[position], -position))[:2]
    pairs = [(first, last) for first in firsts for last in lasts if first != last]
    if not pairs:
        return None
    first, last = min(
        pairs, key=lambda pair: (first_losses[pair[0]] + last_losses[pair[1]], pair[0], -pair[1])
    )
    num_layers = sum(reaches) - first_losses[first] - last_losses[last]
    return _Ends(num_layers=num_layers, first=first, last=last)


def _layers_lost(
    chain: NodeChain, nodes: Sequence[Node], reaches: Sequence[int], end: PartCost
) -> dict[int, int]:
    """Return by position how many fewer layers fit a node if it holds `end` too; nodes too small for `end` are absent.

    `reaches` has the number of layers that fit each node without `end`.
    """
    lost = {}
    for position, (node, reach) in enumerate(zip(nodes, reaches, strict=True)):
        reach_beside_end = chain.reach(node, 0, end)
        if reach_beside_end >= 0:
            lost[position] = reach - reach_beside_end
    return lost


class _Front(NamedTuple):
    """The beginning of an order, with as many layers as its nodes can hold."""

    stop: int  # the first layer that they do not hold
    order: tuple[Node, ...]


# The best front of each set of nodes. A set is given by its number of nodes of each kind.
_Fronts = dict[tuple[int, ...], _Front]


def _order_by_sets(chain: NodeChain, nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """Return an order for layers that differ; nodes that it does not need stand before its last.

    Fronts (see `_Front`) grow node by node. Nodes of one kind, alike in memory and throughput, are interchangeable, and
    of all fronts with the same set of nodes only the one with the most layers is kept.
    """
    kinds: dict[tuple[int, float | None], list[Node]] = {}
    for node in nodes:
        kinds.setdefault((node.memory_bytes, node.tflops), []).append(node)
    nodes_of_kind = tuple(kinds.values())
    embedding, head = chain.cost.embedding, chain.cost.head
    fronts: _Fronts = {(0,) * len(kinds): _Front(0, ())}
    while fronts:
        longer: _Fronts = {}
        for counts, front in fronts.items():
            for kind, node in _next_of_each(nodes_of_kind, counts):
                # If this node can hold all that is left and the head, the order is found.
                if front.order and chain.reach(node, front.stop, head) == chain.num_layers:
                    idle = (other for other in nodes if other not in front.order and other != node)
                    return (*front.order, *idle, node)
                stop = chain.reach(node, front.stop, NO_ENDS if front.order else embedding)
                # The set of the front's nodes and this one.
                grown = (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])
                if stop >= 0 and (grown not in longer or stop > longer[grown].stop):
                    longer[grown] = _Front(stop, (*front.order, node))
        fronts = _most_promising(chain, longer, limit=_MAX_STEPS // len(kinds))
    return None


def _next_of_each(
    nodes_of_kind: Sequence[Sequence[Node]], counts: Sequence[int]
) -> Iterator[tuple[int, Node]]:
    """Yield each kind with a node left, and its next node."""
    for kind, (group, num_used) in enumerate(zip(nodes_of_kind, counts, strict=True)):
        if num_used < len(group):
            yield kind, group[num_used]


def _most_promising(chain: NodeChain, fronts: _Fronts, *, limit: int) -> _Fronts:
    """Return the `limit` fronts that waste the least memory, or under a time limit the least throughput."""
    if len(fronts) <= limit:
        return fronts

    def waste(counts: tuple[int, ...]) -> float:
        stop, order = fronts[counts]
        if chain.max_seconds is None:
            return sum(node.memory_bytes for node in order) - chain.memory[stop]
        return chain.max_seconds * sum(node.flops_per_second for node in order) - chain.flops[stop]

    return {counts: fronts[counts] for counts in sorted(fronts, key=waste)[:limit]}
