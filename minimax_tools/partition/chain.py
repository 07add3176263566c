"""NodeChain: which runs of layers a node can take, and in what order nodes can share all of them.

A stage is a node with a run of layers, the first with the embedding before it, the last with the head behind it.
A stage fits a node whose memory holds it and, where a time is set, that is through with a token in that time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from minimax_tools.partition.cost import ModelCost, PartCost
from minimax_tools.partition.node import Node

# Layers that differ make the order of nodes a search over sets of them. So many steps are taken for each size of set:
# all there are for 10 nodes, no two alike, and for many more that are of few kinds.
_MAX_STEPS = 10 * 252
_FLOPS_PER_TFLOP = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What a stage holds beside layers: the embedding, the head, both or neither.

    Args:
        held_bytes: What stays in memory of it.
        activation_bytes: What it takes while it runs.
        flops: Per token.
    """

    held_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0

    @classmethod
    def of(cls, part: PartCost) -> Ends:
        """The ends that cost so much."""
        return cls(
            held_bytes=part.held_bytes, activation_bytes=part.activation_bytes, flops=part.flops_per_token
        )


class NodeChain:
    """A model's layers in a row, and how far each node gets along it.

    A stage with layers is charged for the activations of the largest: config.json makes them all alike.

    Args:
        cost: Of the model's parts.
    """

    def __init__(self, cost: ModelCost) -> None:
        self.num_layers = len(cost.layers)
        self.activation_bytes = max(layer.activation_bytes for layer in cost.layers)
        self._memory = tuple(accumulate((layer.held_bytes for layer in cost.layers), initial=0))
        self._flops = tuple(accumulate((layer.flops_per_token for layer in cost.layers), initial=0))
        self._ends = {
            (is_first, is_last): Ends.of(cost.of_slice(range(0), has_embedding=is_first, has_head=is_last))
            for is_first in (False, True)
            for is_last in (False, True)
        }
        self.is_uniform = len({(layer.held_bytes, layer.flops_per_token) for layer in cost.layers}) == 1

    @property
    def memory(self) -> Sequence[int]:
        """Bytes held by the layers before each, and at the end by all."""
        return self._memory

    @property
    def flops(self) -> Sequence[int]:
        """FLOPs of the layers before each, and at the end of all."""
        return self._flops

    def ends(self, *, is_first: bool, is_last: bool) -> Ends:
        """What a stage holds beside layers."""
        return self._ends[is_first, is_last]

    def seconds(self, node: Node, layers: range, *, is_first: bool, is_last: bool) -> float:
        """What a token takes on a node whose throughput is known."""
        assert node.tflops is not None, "a time needs a throughput"
        flops = self._flops[layers.stop] - self._flops[layers.start] + self._ends[is_first, is_last].flops
        return flops / (node.tflops * _FLOPS_PER_TFLOP)

    def longest(self, node: Node) -> int:
        """How many layers in a row the node can hold beside nothing else; of layers that differ, the smallest."""
        if self.is_uniform:
            return self.reach(node, 0, is_first=False, is_last=False)
        return max(
            self.reach(node, start, is_first=False, is_last=False) - start for start in range(self.num_layers)
        )

    def reach(
        self, node: Node, start: int, *, is_first: bool, is_last: bool, seconds: float | None = None
    ) -> int:
        """The end of the longest run of layers from `start` on that fits the node; -1 where not even none does."""
        left = self._left(node, is_first=is_first, is_last=is_last, seconds=seconds)
        if left is None:
            return -1
        memory, flops = left
        stop = bisect_right(self._memory, self._memory[start] + memory) - 1
        if flops is not None:
            stop = min(stop, bisect_right(self._flops, self._flops[start] + flops) - 1)
        return max(stop, start)

    def reach_back(
        self, node: Node, stop: int, *, is_first: bool, is_last: bool, seconds: float | None = None
    ) -> int:
        """The start of the longest run of layers up to `stop` that fits the node; past the last where none does."""
        left = self._left(node, is_first=is_first, is_last=is_last, seconds=seconds)
        if left is None:
            return self.num_layers + 1
        memory, flops = left
        start = bisect_left(self._memory, self._memory[stop] - memory)
        if flops is not None:
            start = max(start, bisect_left(self._flops, self._flops[stop] - flops))
        return min(start, stop)

    def _left(
        self, node: Node, *, is_first: bool, is_last: bool, seconds: float | None
    ) -> tuple[int, int | None] | None:
        """What is left of a node for layers: bytes, and FLOPs where there is a time; None where its ends do not fit.

        Bytes below zero: no layer can run there.
        """
        ends = self._ends[is_first, is_last]
        memory = node.memory_bytes - ends.held_bytes
        if memory < ends.activation_bytes:
            return None
        memory -= max(self.activation_bytes, ends.activation_bytes)
        if seconds is None:
            return memory, None
        assert node.tflops is not None, "a time needs a throughput"
        # Whole FLOPs, so that reaching forward and backward agree to the last layer.
        flops = int(seconds * node.tflops * _FLOPS_PER_TFLOP) - ends.flops
        return None if flops < 0 else (memory, flops)


def find_order(
    chain: NodeChain, nodes: Sequence[Node], seconds: float | None = None
) -> tuple[Node, ...] | None:
    """An order in which the nodes can share all layers, near to the given one; None where there is none.

    Which node is first and which is last matters, because they hold the embedding and the head, and where layers
    differ so does all of the order. One node alone is the order where only that works. The search is complete for
    layers that are alike, as MiniMax-M2's, and else for up to 10 nodes or more of few kinds; beyond, only the most
    promising orders are tried.

    Args:
        chain: The layers.
        nodes: In the order to begin with.
        seconds: The most a stage may take for a token; None for any time.
    """
    if _covers(chain, nodes, seconds):
        return tuple(nodes)
    search = _order_of_alike if chain.is_uniform else _order_of_kinds
    order = search(chain, nodes, seconds)
    return order or next(((node,) for node in nodes if _covers(chain, (node,), seconds)), None)


def divide(
    chain: NodeChain, order: Sequence[Node], targets: Sequence[float], seconds: float | None = None
) -> tuple[range, ...]:
    """The layers of each node: as near to the targets as they fit.

    Args:
        chain: The layers.
        order: The nodes, in an order that can share them.
        targets: For each node the layer, or the part of one, that its run should end before.
        seconds: The most a stage may take for a token.
    """
    latest_starts = _latest_starts(chain, order, seconds)
    runs: list[range] = []
    start = 0
    for position, (node, target) in enumerate(zip(order, targets, strict=True)):
        remaining = len(order) - position - 1
        stop = round(target)
        if len(order) <= chain.num_layers:
            # At least a layer each, where that is possible.
            stop = min(max(stop, start + 1), chain.num_layers - remaining)
        farthest = chain.reach(node, start, is_first=position == 0, is_last=remaining == 0, seconds=seconds)
        stop = min(max(stop, latest_starts[position + 1], start), farthest)
        runs.append(range(start, stop))
        start = stop
    assert start == chain.num_layers, "the order was found to cover all layers"
    return tuple(runs)


def _covers(chain: NodeChain, order: Sequence[Node], seconds: float | None) -> bool:
    stop = 0
    for position, node in enumerate(order):
        stop = chain.reach(
            node, stop, is_first=position == 0, is_last=position == len(order) - 1, seconds=seconds
        )
        if stop < 0:
            return False
    return stop == chain.num_layers


def _latest_starts(chain: NodeChain, order: Sequence[Node], seconds: float | None) -> list[int]:
    """For each node the first layer that it and those behind it can share to the end; last the number of layers."""
    starts = [chain.num_layers]
    for position in reversed(range(len(order))):
        starts.append(
            chain.reach_back(
                order[position],
                starts[-1],
                is_first=position == 0,
                is_last=position == len(order) - 1,
                seconds=seconds,
            )
        )
    return starts[::-1]


def count_room(chain: NodeChain, nodes: Sequence[Node], seconds: float | None = None) -> int:
    """How many layers two or more nodes have room for in the best order, if all are alike.

    -1 where no two of them have room for embedding and head.
    """
    room, _, _ = _best_ends(chain, nodes, seconds)
    return room


def _order_of_alike(
    chain: NodeChain, nodes: Sequence[Node], seconds: float | None
) -> tuple[Node, ...] | None:
    """Of layers that are alike each node takes so many, wherever it stands: only the ends are to be chosen."""
    room, first, last = _best_ends(chain, nodes, seconds)
    if room < chain.num_layers:
        return None
    between = (node for position, node in enumerate(nodes) if position not in (first, last))
    return (nodes[first], *between, nodes[last])


def _best_ends(chain: NodeChain, nodes: Sequence[Node], seconds: float | None) -> tuple[int, int, int]:
    """The layers that fit with the best two nodes at the ends, and who they are."""

    def most(node: Node, *, is_first: bool = False, is_last: bool = False) -> int:
        return chain.reach(node, 0, is_first=is_first, is_last=is_last, seconds=seconds)

    middle = [most(node) for node in nodes]

    def cheapest(*, is_first: bool) -> list[tuple[int, int]]:
        """What it costs to put a node at this end; the two cheapest suffice, since one node takes one end."""
        at_end = [most(node, is_first=is_first, is_last=not is_first) for node in nodes]
        costs = [
            (inner - outer, position)
            for position, (inner, outer) in enumerate(zip(middle, at_end, strict=True))
            if outer >= 0
        ]
        # Of those that cost the same, the one that is nearest to this end.
        return sorted(costs, key=lambda found: (found[0], found[1] if is_first else -found[1]))[:2]

    pairs = [
        (first_cost + last_cost, first, -last)
        for first_cost, first in cheapest(is_first=True)
        for last_cost, last in cheapest(is_first=False)
        if first != last
    ]
    if not pairs:
        return -1, 0, 0
    cost, first, last = min(pairs)
    return sum(middle) - cost, first, -last


def _order_of_kinds(
    chain: NodeChain, nodes: Sequence[Node], seconds: float | None
) -> tuple[Node, ...] | None:
    """An order of some of the nodes, those that it does not need between its last two.

    Of nodes of one kind it does not matter which comes first, and of a set of nodes all that matters is the farthest
    that it can get.
    """
    groups: dict[tuple[int, float | None], list[Node]] = {}
    for node in nodes:
        groups.setdefault((node.memory_bytes, node.tflops), []).append(node)
    kinds = tuple(groups.values())
    sets: dict[tuple[int, ...], tuple[int, tuple[Node, ...]]] = {(0,) * len(kinds): (0, ())}
    while sets:
        larger: dict[tuple[int, ...], tuple[int, tuple[Node, ...]]] = {}
        for used, (start, order) in sets.items():
            for kind, node in _next_of_each(kinds, used):
                is_first = not order
                if order and chain.reach(node, start, is_first=False, is_last=True, seconds=seconds) == (
                    chain.num_layers
                ):
                    idle = (other for other in nodes if other not in order and other != node)
                    return (*order, *idle, node)
                stop = chain.reach(node, start, is_first=is_first, is_last=False, seconds=seconds)
                now = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                if stop >= 0 and (now not in larger or stop > larger[now][0]):
                    larger[now] = (stop, (*order, node))
        sets = _most_promising(chain, larger, limit=_MAX_STEPS // len(kinds), seconds=seconds)
    return None


def _next_of_each(kinds: Sequence[Sequence[Node]], used: Sequence[int]) -> Iterator[tuple[int, Node]]:
    for kind, (group, num_used) in enumerate(zip(kinds, used, strict=True)):
        if num_used < len(group):
            yield kind, group[num_used]


def _most_promising(
    chain: NodeChain,
    sets: dict[tuple[int, ...], tuple[int, tuple[Node, ...]]],
    *,
    limit: int,
    seconds: float | None,
) -> dict[tuple[int, ...], tuple[int, tuple[Node, ...]]]:
    """The sets of nodes that leave the least of themselves unused."""
    if len(sets) <= limit:
        return sets

    def waste(found: tuple[tuple[int, ...], tuple[int, tuple[Node, ...]]]) -> float:
        _, (stop, order) = found
        if seconds is None:
            return sum(node.memory_bytes for node in order) - chain.memory[stop]
        return seconds * _FLOPS_PER_TFLOP * sum(node.tflops or 0 for node in order) - chain.flops[stop]

    return dict(sorted(sets.items(), key=waste)[:limit])
