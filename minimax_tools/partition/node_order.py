"""Orders of nodes that can share all layers of a `NodeChain`, and the run of each node in an order.

A run is a range of layers; the ends are embedding and head. `chain.reach(node, start, ends)` is the layer behind the
longest run from `start` that the node can hold beside its `ends`: `start` if no layer fits, -1 if the ends do not.
`chain.memory[n]` and `chain.flops[n]` are sums over the first n layers.

NodeChain: the layers of a model in a row, and which runs of them fit a node.

A run is a range of consecutive layers. Each node gets one run. The *ends* of the model lie beside it: the first node
also holds the embedding, the last one the head (final norm, lm_head and the rest). A run fits a node that has the
memory for it and, if there is a time limit, computes a token within it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import NamedTuple

from minimax_tools.partition.cost import ModelCost, PartCost
from minimax_tools.partition.node import Node

# What a node holds beside its layers if it is neither first nor last.
NO_ENDS = PartCost()


class NodeChain:
    """The layers of a model in a row.

    Every node with layers is charged for the activations of the largest layer: all layers of one config.json need
    equally many.

    Attributes:
        memory: Running sums of bytes of weights, keys and values: `memory[n]` is that of the first n layers.
        flops: Running sums of FLOPs per token, likewise.
        is_uniform: True if all layers cost the same.
        max_seconds: Limit on the time of one node for one token; None for no limit.
    """

    def __init__(self, cost: ModelCost) -> None:
        self.cost = cost
        self.num_layers = len(cost.layers)
        self.activation_bytes = max(layer.activation_bytes for layer in cost.layers)
        self.memory = tuple(accumulate((layer.held_bytes for layer in cost.layers), initial=0))
        self.flops = tuple(accumulate((layer.flops_per_token for layer in cost.layers), initial=0))
        self.is_uniform = len({(layer.held_bytes, layer.flops_per_token) for layer in cost.layers}) == 1
        self.max_seconds: float | None = None
        self._whole_ends = cost.of_slice(range(0), has_embedding=True, has_head=True)

    def within(self, seconds: float) -> NodeChain:
        """Return this chain with a limit on the time that one node takes for one token."""
        chain = copy(self)
        chain.max_seconds = seconds
        return chain

    def ends(self, num_nodes: int) -> tuple[PartCost, ...]:
        """Return the cost of what each of `num_nodes` nodes holds beside its layers: embedding, head or nothing."""
        if num_nodes == 1:
            return (self._whole_ends,)
        return (self.cost.embedding, *[NO_ENDS] * (num_nodes - 2), self.cost.head)

    def seconds(self, node: Node, layers: range, ends: PartCost = NO_ENDS) -> float:
        """Return the time that a node of known throughput takes for one token: its layers and `ends`."""
        flops = self.flops[layers.stop] - self.flops[layers.start] + ends.flops_per_token
        return flops / node.flops_per_second

    def longest(self, node: Node) -> int:
        """Return the length of the longest run that fits the node without embedding and head."""
        # If all layers cost the same, runs from every start are equally long.
        starts = range(1 if self.is_uniform else self.num_layers)
        return max(self.reach(node, start) - start for start in starts)

    def reach(self, node: Node, start: int, ends: PartCost = NO_ENDS) -> int:
        """Return the end of the longest run from layer `start` that fits the node beside `ends`.

        Returns:
            The first layer behind the run; `start` if no layer fits, -1 if not even `ends` fit.
        """
        room = self._room(node, ends)
        if room is None:
            return -1
        stop = bisect_right(self.memory, self.memory[start] + room.memory) - 1
        if room.flops is not None:
            stop = min(stop, bisect_right(self.flops, self.flops[start] + room.flops) - 1)
        return max(stop, start)

    def reach_back(self, node: Node, stop: int, ends: PartCost = NO_ENDS) -> int:
        """Return the start of the longest run up to layer `stop`, exclusive, that fits the node beside `ends`.

        Returns:
            The run's first layer; `stop` if no layer fits, `num_layers + 1` if not even `ends` fit.
        """
        room = self._room(node, ends)
        if room is None:
            return self.num_layers + 1
        start = bisect_left(self.memory, self.memory[stop] - room.memory)
        if room.flops is not None:
            start = max(start, bisect_left(self.flops, self.flops[stop] - room.flops))
        return min(start, stop)

    def _room(self, node: Node, ends: PartCost) -> _Room | None:
        """Return what a node has left for layers beside `ends`; None if `ends` do not fit."""
        memory = node.memory_bytes - ends.held_bytes
        if memory < ends.activation_bytes:
            return None
        # Layers and ends run one after the other, so the larger activations count.
        memory -= max(self.activation_bytes, ends.activation_bytes)
        if self.max_seconds is None:
            return _Room(memory, None)
        # Whole FLOPs, so that reaching forward and backward agree to the last layer.
        flops = int(self.max_seconds * node.flops_per_second) - ends.flops_per_token
        return None if flops < 0 else _Room(memory, flops)


class _Room(NamedTuple):
    """Room for layers on a node."""

    memory: int  # bytes; negative if no layer fits
    flops: int | None  # FLOPs per token; None without a time limit


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
