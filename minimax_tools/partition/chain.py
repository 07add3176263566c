"""NodeChain: the runs of layers that fit a node, and the orders of nodes that can share all layers.

A stage is a node with a run of layers. The first stage also holds the embedding, the last the head.
A stage fits a node that has the memory for it and, under a time limit, is fast enough for one token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import accumulate

from minimax_tools.partition.cost import ModelCost, PartCost
from minimax_tools.partition.node import Node

# Where layers differ, the order is searched over sets of nodes. This limits the steps for each size of set:
# enough for all sets of 10 different nodes, and of many more nodes of few kinds.
_MAX_STEPS = 10 * 252
_NO_ENDS = PartCost()

# By number of nodes of each kind in a set: the end of the farthest run of layers, and the order that reaches it.
_Reached = dict[tuple[int, ...], tuple[int, tuple[Node, ...]]]


class NodeChain:
    """The layers of a model in a row, and how many of them fit each node.

    A stage with layers is charged for the activations of the largest layer: all layers of one config.json take
    the same.

    Args:
        cost: Cost of the model's parts.
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
        """Return this chain with a limit on the time that a stage takes for one token."""
        chain = copy(self)
        chain.max_seconds = seconds
        return chain

    def ends(self, num_nodes: int) -> tuple[PartCost, ...]:
        """Return what each of several stages in a row holds beside its layers."""
        if num_nodes == 1:
            return (self._whole_ends,)
        return (self.cost.embedding, *[_NO_ENDS] * (num_nodes - 2), self.cost.head)

    def seconds(self, node: Node, layers: range, ends: PartCost = _NO_ENDS) -> float:
        """Return the time of a stage for one token, on a node whose throughput is known."""
        flops = self.flops[layers.stop] - self.flops[layers.start] + ends.flops_per_token
        return flops / node.flops_per_second

    def longest(self, node: Node) -> int:
        """Return the largest number of layers in a row that fit the node without embedding and head."""
        starts = range(1 if self.is_uniform else self.num_layers)
        return max(self.reach(node, start) - start for start in starts)

    def reach(self, node: Node, start: int, ends: PartCost = _NO_ENDS) -> int:
        """Return the end of the longest run of layers from `start` that fits the node beside `ends`.

        Returns:
            The layer behind the run, `start` for an empty run, or -1 if not even `ends` fit.
        """
        room = self._room(node, ends)
        if room is None:
            return -1
        memory, flops = room
        stop = bisect_right(self.memory, self.memory[start] + memory) - 1
        if flops is not None:
            stop = min(stop, bisect_right(self.flops, self.flops[start] + flops) - 1)
        return max(stop, start)

    def reach_back(self, node: Node, stop: int, ends: PartCost = _NO_ENDS) -> int:
        """Return the start of the longest run of layers up to `stop` that fits the node beside `ends`.

        Returns:
            The run's first layer, `stop` for an empty run, or one more than `num_layers` if not even `ends` fit.
        """
        room = self._room(node, ends)
        if room is None:
            return self.num_layers + 1
        memory, flops = room
        start = bisect_left(self.memory, self.memory[stop] - memory)
        if flops is not None:
            start = max(start, bisect_left(self.flops, self.flops[stop] - flops))
        return min(start, stop)

    def _room(self, node: Node, ends: PartCost) -> tuple[int, int | None] | None:
        """Return a node's bytes and FLOPs left for layers beside `ends`; None if `ends` do not fit.

        The FLOPs are None without a time limit. Bytes below zero mean that no layer fits.
        """
        memory = node.memory_bytes - ends.held_bytes
        if memory < ends.activation_bytes:
            return None
        memory -= max(self.activation_bytes, ends.activation_bytes)
        if self.max_seconds is None:
            return memory, None
        # Whole FLOPs, so that reaching forward and backward agree to the last layer.
        flops = int(self.max_seconds * node.flops_per_second) - ends.flops_per_token
        return None if flops < 0 else (memory, flops)


def find_order(chain: NodeChain, nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """Return an order of the nodes that can share all layers, close to the given one; None if there is none.

    The first and the last node matter, because they hold the embedding and the head. Where layers differ, the whole
    order matters. One node alone is returned where no other order works.

    The search is complete for layers that are all alike, as in MiniMax-M2. For layers that differ it is complete for
    up to 10 nodes, or more nodes of few kinds. Beyond that only the most promising orders are tried.
    """
    if _covers(chain, nodes):
        return tuple(nodes)
    order = (_order_uniform if chain.is_uniform else _order_by_sets)(chain, nodes)
    return order or next(((node,) for node in nodes if _covers(chain, (node,))), None)


def divide(chain: NodeChain, order: Sequence[Node], targets: Sequence[float]) -> tuple[range, ...]:
    """Return the layers of each node, as close to the targets as they fit.

    Args:
        chain: The layers.
        order: The nodes, in an order that can share them.
        targets: For each node the layer at which its run should end; fractions of a layer count.
    """
    all_ends = chain.ends(len(order))
    latest_starts = _latest_starts(chain, order)
    runs: list[range] = []
    start = 0
    for position, (node, ends, target) in enumerate(zip(order, all_ends, targets, strict=True)):
        stop = round(target)
        if len(order) <= chain.num_layers:
            # At least one layer for each node, where there are enough.
            stop = min(max(stop, start + 1), chain.num_layers - (len(order) - position - 1))
        stop = min(max(stop, latest_starts[position + 1], start), chain.reach(node, start, ends))
        runs.append(range(start, stop))
        start = stop
    assert start == chain.num_layers, "the order was found to cover all layers"
    return tuple(runs)


def count_room(chain: NodeChain, nodes: Sequence[Node]) -> int:
    """Return the number of layers that fit two or more nodes in the best order, if all layers are alike.

    Returns:
        The number, or -1 if no two nodes have room for embedding and head.
    """
    room, _, _ = _choose_ends(chain, nodes)
    return room


def _covers(chain: NodeChain, order: Sequence[Node]) -> bool:
    stop = 0
    for node, ends in zip(order, chain.ends(len(order)), strict=True):
        stop = chain.reach(node, stop, ends)
        if stop < 0:
            return False
    return stop == chain.num_layers


def _latest_starts(chain: NodeChain, order: Sequence[Node]) -> list[int]:
    """Return the first layer that each node and those behind it can share to the end; last `num_layers`."""
    starts = [chain.num_layers]
    for node, ends in zip(reversed(order), reversed(chain.ends(len(order))), strict=True):
        starts.append(chain.reach_back(node, starts[-1], ends))
    return starts[::-1]


def _order_uniform(chain: NodeChain, nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """Return an order for layers that are all alike: only the first and the last node need a choice."""
    room, first, last = _choose_ends(chain, nodes)
    if room < chain.num_layers:
        return None
    between = (node for position, node in enumerate(nodes) if position not in (first, last))
    return (nodes[first], *between, nodes[last])


def _choose_ends(chain: NodeChain, nodes: Sequence[Node]) -> tuple[int, int, int]:
    """Return the number of layers that fit with the best two nodes at the ends, and the two positions."""
    middle = [chain.reach(node, 0) for node in nodes]

    def cheapest(ends: PartCost, direction: int) -> list[tuple[int, int]]:
        """Return layers lost and position of the two nodes that lose the fewest layers at this end."""
        at_end = [chain.reach(node, 0, ends) for node in nodes]
        costs = [
            (inner - outer, position)
            for position, (inner, outer) in enumerate(zip(middle, at_end, strict=True))
            if outer >= 0
        ]
        # Two suffice: a node takes only one end. Among equals, the node nearest to this end.
        return sorted(costs, key=lambda found: (found[0], direction * found[1]))[:2]

    pairs = [
        (first_cost + last_cost, first, -last)
        for first_cost, first in cheapest(chain.cost.embedding, 1)
        for last_cost, last in cheapest(chain.cost.head, -1)
        if first != last
    ]
    if not pairs:
        return -1, 0, 0
    cost, first, last = min(pairs)
    return sum(middle) - cost, first, -last


def _order_by_sets(chain: NodeChain, nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """Return an order for layers that differ; nodes that it does not need stand before its last.

    Nodes of one kind are interchangeable, and of each set of nodes only the farthest run counts.
    """
    groups: dict[tuple[int, float | None], list[Node]] = {}
    for node in nodes:
        groups.setdefault((node.memory_bytes, node.tflops), []).append(node)
    kinds = tuple(groups.values())
    embedding, head = chain.cost.embedding, chain.cost.head
    sets: _Reached = {(0,) * len(kinds): (0, ())}
    while sets:
        larger: _Reached = {}
        for used, (start, order) in sets.items():
            for kind, node in _next_of_each(kinds, used):
                if order and chain.reach(node, start, head) == chain.num_layers:
                    idle = (other for other in nodes if other not in order and other != node)
                    return (*order, *idle, node)
                stop = chain.reach(node, start, _NO_ENDS if order else embedding)
                now = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                if stop >= 0 and (now not in larger or stop > larger[now][0]):
                    larger[now] = (stop, (*order, node))
        sets = _most_promising(chain, larger, limit=_MAX_STEPS // len(kinds))
    return None


def _next_of_each(kinds: Sequence[Sequence[Node]], used: Sequence[int]) -> Iterator[tuple[int, Node]]:
    for kind, (group, num_used) in enumerate(zip(kinds, used, strict=True)):
        if num_used < len(group):
            yield kind, group[num_used]


def _most_promising(chain: NodeChain, sets: _Reached, *, limit: int) -> _Reached:
    """Return the sets of nodes that waste the least memory, or under a time limit the least throughput."""

    def waste(found: tuple[tuple[int, ...], tuple[int, tuple[Node, ...]]]) -> float:
        _, (stop, order) = found
        if chain.max_seconds is None:
            return sum(node.memory_bytes for node in order) - chain.memory[stop]
        return chain.max_seconds * sum(node.flops_per_second for node in order) - chain.flops[stop]

    return sets if len(sets) <= limit else dict(sorted(sets.items(), key=waste)[:limit])
