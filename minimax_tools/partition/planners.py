"""Planners: the division of layers among nodes.

| planner | layers are divided |
|---|---|
| `memory` | by memory, the largest node first: all nodes are equally full |
| `balanced` | so that the slowest node is as fast as possible; the fastest node first |
| `manual` | as each node says |

Rules of `memory` and `balanced`:

- No node gets more than its memory holds, counting embedding, head and activations.
- A division is found if there is one and all layers cost the same, as in MiniMax-M2, or the nodes are few.
- `memory` gives each node at least one layer if enough layers fit.
- If there are more nodes than layers, the last nodes stay idle, but for one that may hold the embedding or the head
  alone.
- The order in which nodes are given does not matter.

A node's run is its consecutive layers. The ends are the embedding, on the first node, and the head, on the last.
`held_bytes` are weights, keys and values; `memory_bytes` adds the activations.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate, permutations
from types import MappingProxyType

from minimax_tools.errors import CannotRunError, UsageError, format_count, list_faults
from minimax_tools.machine.size import format_size
from minimax_tools.partition.cost import ModelCost, PartCost
from minimax_tools.partition.node import Node, Planner, Stage, check_nodes, stage_cost

# What a node holds beside its layers if it is neither first nor last.
NO_ENDS = PartCost()


class NodeChain:
    """The layers of a model in a row, and which runs of them fit a node.

    Every node with layers is charged for the activations of the largest layer: all layers of one config.json need
    equally many.
    """

    def __init__(self, cost: ModelCost) -> None:
        self.cost = cost
        self.num_layers = len(cost.layers)
        self.activation_bytes = max(layer.activation_bytes for layer in cost.layers)
        # Sums over the first n layers: bytes of weights, keys and values, and FLOPs per token.
        self.memory = tuple(accumulate((layer.held_bytes for layer in cost.layers), initial=0))
        self.flops = tuple(accumulate((layer.flops_per_token for layer in cost.layers), initial=0))
        self.is_uniform = len({(layer.held_bytes, layer.flops_per_token) for layer in cost.layers}) == 1
        self.max_seconds: float | None = None  # limit on the time of one node for one token
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

    def reach(self, node: Node, start: int, ends: PartCost = NO_ENDS) -> int:
        """Return the layer behind the longest run from layer `start` that fits the node beside `ends`.

        It is `start` if no layer fits, and -1 if not even `ends` fit.
        """
        memory, flops = self._room(node, ends)
        if node.memory_bytes < ends.memory_bytes or flops < 0:
            return -1
        by_memory = bisect_right(self.memory, self.memory[start] + memory) - 1
        return max(min(by_memory, bisect_right(self.flops, self.flops[start] + flops) - 1), start)

    def reach_back(self, node: Node, stop: int, ends: PartCost) -> int:
        """Return the first layer of the longest run up to layer `stop`, exclusive; `ends` must fit the node."""
        memory, flops = self._room(node, ends)
        by_memory = bisect_left(self.memory, self.memory[stop] - memory)
        return min(max(by_memory, bisect_left(self.flops, self.flops[stop] - flops)), stop)

    def _room(self, node: Node, ends: PartCost) -> tuple[int, float]:
        """Return the bytes and the FLOPs per token that a node has left for layers beside `ends`."""
        # Layers and ends run one after the other, so the larger activations count.
        activation_bytes = max(self.activation_bytes, ends.activation_bytes)
        memory = node.memory_bytes - ends.held_bytes - activation_bytes
        if self.max_seconds is None:
            return memory, math.inf
        # Whole FLOPs, so that reaching forward and backward agree to the last layer.
        return memory, int(self.max_seconds * node.flops_per_second) - ends.flops_per_token


# Most nodes of which all orders are tried, if layers differ: 720 orders.
_MAX_PERMUTED = 6


def find_order(chain: NodeChain, nodes: Sequence[Node]) -> tuple[Node, ...] | None:
    """Return an order of the nodes that can share all layers, close to the given one; None if none was found.

    The first node needs room for the embedding, the last one for the head. If all layers cost the same, only the choice
    of these two matters. If layers differ, the whole order matters, and all orders of a few nodes are tried.
    """
    return next((order for order in _orders(chain, nodes) if _covers(chain, order)), None)


def _orders(chain: NodeChain, nodes: Sequence[Node]) -> Iterator[tuple[Node, ...]]:
    """Yield orders to try: as given, with the best ends, any, and each node alone."""
    yield tuple(nodes)
    # All layers cost the same here, or nearly: so as many fit a node anywhere as from layer 0.
    reaches = [chain.reach(node, 0) for node in nodes]
    first_losses = _layers_lost(chain, nodes, reaches, chain.cost.embedding)
    last_losses = _layers_lost(chain, nodes, reaches, chain.cost.head)
    # The least loss wins; among equals, the foremost node as the first and the hindmost as the last. Two candidates for
    # each end suffice: the best node may be the best for both ends, but can take only one.
    firsts = sorted(first_losses, key=lambda position: (first_losses[position], position))[:2]
    lasts = sorted(last_losses, key=lambda position: (last_losses[position], -position))[:2]
    pairs = [(first, last) for first in firsts for last in lasts if first != last]
    if pairs:
        ends = min(pairs, key=lambda pair: (first_losses[pair[0]] + last_losses[pair[1]], pair[0], -pair[1]))
        between = (node for position, node in enumerate(nodes) if position not in ends)
        yield (nodes[ends[0]], *between, nodes[ends[1]])
    if not chain.is_uniform and len(nodes) <= _MAX_PERMUTED:
        yield from permutations(nodes)
    yield from ((node,) for node in nodes)


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


# Relative precision to which the balanced planner finds the slowest stage's time: finer than throughputs are known.
_PRECISION = 1e-9


def plan_stages(planner: str, cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    """Return the stages in the order in which a token passes them; idle nodes come last.

    Raises:
        UsageError: The planner is unknown, or a node lacks a figure that the planner needs.
        CannotRunError: The nodes cannot hold the model.
    """
    if planner not in list(Planner):
        raise UsageError(f"no planner {planner!r}", expected="one of " + ", ".join(Planner))
    return PLANNERS[Planner(planner)](cost, check_nodes(nodes))


def _plan_memory(cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    nodes = sorted(nodes, key=lambda node: (node.memory_bytes, node.name), reverse=True)
    chain = NodeChain(cost)
    order = _require_order(chain, nodes)
    return _make_stages(nodes, order, divide(chain, order, _targets_by_memory(chain, order)))


def _plan_balanced(cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    """Search by bisection for the shortest time in which every node can compute its run for one token."""
    nodes = _sort_by_speed(nodes)
    chain = NodeChain(cost)
    order = _require_order(chain, nodes)
    runs = divide(chain, order, _targets_by_speed(chain, order))
    slowest = _slowest_seconds(chain, order, runs)
    # No division takes less time than if all nodes worked all the time.
    total_speed = sum(node.flops_per_second for node in nodes)
    too_short = cost.whole.flops_per_token / total_speed * (1 - _PRECISION)
    while slowest > too_short * (1 + _PRECISION):
        limit = (too_short + slowest) / 2
        limited = chain.within(limit)
        faster = find_order(limited, nodes)
        if faster is None:
            too_short = limit
            continue
        order = faster
        runs = divide(limited, order, _targets_by_speed(chain, order))
        # The division may be faster than the limit.
        slowest = min(slowest, _slowest_seconds(chain, order, runs))
    return _make_stages(nodes, order, runs)


def _plan_manual(cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    without = [node.name for node in nodes if node.layers is None]
    if without:
        raise UsageError(
            "the manual planner needs each node's layers",
            found=f"none for {list_faults(without)}",
            next_step="Write --node NAME:memory=40GB,layers=A:B, half-open.",
        )
    runs = [(node, node.layers) for node in nodes if node.layers is not None]
    runs.sort(key=lambda run: run[1])
    # The spans meet if each starts where the one before stops; the model starts at 0 and stops behind its last layer.
    starts = [span.start for _, span in runs] + [len(cost.layers)]
    stops = [0] + [span.stop for _, span in runs]
    if starts != stops:
        raise UsageError(
            "these runs do not cover each layer of the model once",
            expected=f"runs that meet, from layer 0 to {len(cost.layers) - 1}",
            found=", ".join(f"{node.name}: {span}" for node, span in runs),
        )
    order = [node for node, _ in runs]
    stages = _make_stages(nodes, order, [range(span.start, span.stop) for _, span in runs])
    too_large = []
    for stage in stages:
        needed, memory = stage_cost(cost, stage).memory_bytes, stage.node.memory_bytes
        if needed > memory:
            too_large.append(f"{stage.node.name} needs {format_size(needed)} and has {format_size(memory)}")
    if too_large:
        raise CannotRunError(
            "the chosen layers do not fit their nodes",
            found=list_faults(too_large),
            next_step="Give them fewer layers, or let a planner divide: --planner memory.",
        )
    return stages


PLANNERS: Mapping[Planner, Callable[[ModelCost, Sequence[Node]], tuple[Stage, ...]]] = MappingProxyType(
    {
        Planner.MEMORY: _plan_memory,
        Planner.BALANCED: _plan_balanced,
        Planner.MANUAL: _plan_manual,
    }
)


def _make_stages(nodes: Sequence[Node], order: Sequence[Node], runs: Sequence[range]) -> tuple[Stage, ...]:
    stages = [
        Stage(node=node, layers=layers, has_embedding=position == 0, has_head=position == len(order) - 1)
        for position, (node, layers) in enumerate(zip(order, runs, strict=True))
    ]
    used = [stage for stage in stages if stage.is_used]
    used_nodes = {stage.node for stage in used}
    no_layers = range(used[-1].layers.stop, used[-1].layers.stop)
    idle = [Stage(node=node, layers=no_layers) for node in nodes if node not in used_nodes]
    return (*used, *idle)


def _targets_by_memory(chain: NodeChain, order: Sequence[Node]) -> list[float]:
    """Return the end of each node's run, in layers with fractions, for which all nodes are equally full."""
    # A node holds its run, its ends and activations. The sums of `chain.memory` are of runs alone, so from what the
    # first nodes should hold together, the embedding and their activations are subtracted.
    activations = [chain.activation_bytes] * len(order)
    total = chain.memory[-1] + sum(ends.held_bytes for ends in chain.ends(len(order))) + sum(activations)
    memory = [node.memory_bytes for node in order]
    targets = [
        _layer_at(
            chain.memory, total * (memory_so_far / sum(memory)) - chain.cost.embedding.held_bytes - others
        )
        for memory_so_far, others in zip(accumulate(memory), accumulate(activations), strict=True)
    ]
    return _round_shares(targets) if chain.is_uniform else targets


def _targets_by_speed(chain: NodeChain, order: Sequence[Node]) -> list[float]:
    """Return the end of each node's run, in layers with fractions, for which all nodes take equally long."""
    total = chain.cost.whole.flops_per_token
    speeds = [node.flops_per_second for node in order]
    targets = [
        _layer_at(chain.flops, total * (speed_so_far / sum(speeds)) - chain.cost.embedding.flops_per_token)
        for speed_so_far in accumulate(speeds)
    ]
    return _round_shares(targets) if chain.is_uniform else targets


def _round_shares(targets: Sequence[float]) -> list[float]:
    """Return the targets moved so that each node's share is a whole number of layers.

    Shares are rounded down, and the layers left over go to the largest fractions. Rounding the targets themselves
    could give a node more layers than a larger node.
    """
    starts = [0.0, *targets[:-1]]
    shares = [max(stop - start, 0.0) for start, stop in zip(starts, targets, strict=True)]
    rounded = [int(share) for share in shares]
    num_left = round(targets[-1]) - sum(rounded)
    fractions = [share - whole for share, whole in zip(shares, rounded, strict=True)]
    # Sorting is stable: of equal fractions, the first comes first.
    by_fraction = sorted(range(len(shares)), key=fractions.__getitem__, reverse=True)
    for position in by_fraction[: max(num_left, 0)]:
        rounded[position] += 1
    return [float(stop) for stop in accumulate(rounded)]


def _layer_at(sums: Sequence[int], value: float) -> float:
    """Return the number of layers, with a fraction, at which the running sum over the layers reaches `value`."""
    layer = min(max(bisect_right(sums, value) - 1, 0), len(sums) - 2)
    size = sums[layer + 1] - sums[layer]
    fraction = (value - sums[layer]) / size if size else 0.0
    return layer + min(max(fraction, 0.0), 1.0)


def _sort_by_speed(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes, the fastest first, after checking that each has a throughput."""
    without = [node.name for node in nodes if node.tflops is None]
    if without:
        raise UsageError(
            "the balanced planner needs each node's throughput",
            found=f"none for {list_faults(without)}",
            next_step="Write --node NAME:memory=40GB,tflops=312.",
        )
    return sorted(nodes, key=lambda node: (node.flops_per_second, node.memory_bytes, node.name), reverse=True)


def _slowest_seconds(chain: NodeChain, order: Sequence[Node], runs: Sequence[range]) -> float:
    """Return the time of the slowest node for one token."""
    return max(
        chain.seconds(node, layers, ends)
        for node, layers, ends in zip(order, runs, chain.ends(len(order)), strict=True)
    )


def _require_order(chain: NodeChain, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return an order of nodes that can share the model.

    First the foremost nodes that can hold a layer are tried, as many as there are layers; then all such nodes; then
    also the nodes that can hold only embedding or head.

    Raises:
        CannotRunError: No order was found.
    """
    # Of layers that differ, the smallest counts.
    starts = range(1 if chain.is_uniform else chain.num_layers)
    able = [node for node in nodes if any(chain.reach(node, start) > start for start in starts)]
    for candidates in (able[: chain.num_layers], able, nodes):
        order = find_order(chain, candidates) if candidates else None
        if order is not None:
            return order
    largest = max(chain.cost.layers, key=lambda layer: layer.held_bytes)
    rooms = [f"{node.name}: {format_size(node.memory_bytes)}" for node in nodes]
    raise CannotRunError(
        f"{format_count(len(nodes), 'node')} cannot hold the model",
        expected=f"room for {format_size(chain.cost.whole.held_bytes)} of weights, keys and values, in pieces of a "
        f"layer ({format_size(largest.held_bytes)}), and on each node {format_size(largest.activation_bytes)} of "
        "activations",
        found=f"{list_faults(_shortages(chain, nodes))} ({list_faults(rooms)})",
        next_step="Add nodes or memory, or plan for a shorter context or fewer rows.",
    )


def _shortages(chain: NodeChain, nodes: Sequence[Node]) -> list[str]:
    """Return the reasons why the nodes cannot share the model."""
    cost = chain.cost
    faults = [
        f"no node has the {format_size(part.memory_bytes)} that the {name} takes"
        for name, part in (("embedding", cost.embedding), ("head", cost.head))
        if max(node.memory_bytes for node in nodes) < part.memory_bytes
    ]
    if faults:
        return faults
    total = sum(node.memory_bytes for node in nodes)
    needed = cost.whole.held_bytes + cost.layers[0].activation_bytes
    if total < needed:
        return [f"{format_size(total)} in all, {format_size(needed - total)} too little"]
    return [f"{format_size(total)} in all, but the model does not fit in any order of the nodes"]
