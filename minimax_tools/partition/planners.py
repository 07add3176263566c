"""Planners: the division of layers among nodes.

| planner | layers are divided |
|---|---|
| `memory` | by memory, the largest node first: all nodes are equally full |
| `compute` | by throughput, the fastest node first: all nodes take equally long |
| `balanced` | so that the slowest node is as fast as possible |
| `manual` | as each node says |

Rules of all planners:

- No node gets more than its memory holds, counting embedding, head and activations.
- A division is found if there is one, except perhaps for over 10 nodes if layers differ. `manual` searches for none.
- `memory` and `compute` give each node at least one layer if enough layers fit.
- If there are more nodes than layers, the last nodes stay idle, but for one that may hold the embedding or the head
  alone.
- The order in which nodes are given does not matter.

A node's run is its consecutive layers. The ends are the embedding, on the first node, and the head, on the last.
`held_bytes` are weights, keys and values; `memory_bytes` adds the activations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

from minimax_tools.errors import CannotRunError, UsageError, format_count, list_faults
from minimax_tools.machine.size import format_size
from minimax_tools.partition.cost import ModelCost
from minimax_tools.partition.node import Node, Planner, Stage, check_nodes, stage_cost
from minimax_tools.partition.node_order import NodeChain, count_room, divide, find_order

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
    return _plan_by_shares(NodeChain(cost), nodes, _targets_by_memory)


def _plan_compute(cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    return _plan_by_shares(NodeChain(cost), _sort_by_speed(nodes, "compute"), _targets_by_speed)


def _plan_by_shares(
    chain: NodeChain, nodes: Sequence[Node], find_targets: Callable[[NodeChain, Sequence[Node]], list[float]]
) -> tuple[Stage, ...]:
    """Divide so that each node's run ends near its target: `find_targets(chain, order)` gives them, in layers."""
    order = _require_order(chain, nodes)
    return _make_stages(nodes, order, divide(chain, order, find_targets(chain, order)))


def _plan_balanced(cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    """Search by bisection for the shortest time in which every node can compute its run for one token."""
    nodes = _sort_by_speed(nodes, "balanced")
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
        Planner.COMPUTE: _plan_compute,
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


def _sort_by_speed(nodes: Sequence[Node], planner: str) -> list[Node]:
    """Return the nodes, the fastest first, after checking that each has a throughput."""
    without = [node.name for node in nodes if node.tflops is None]
    if without:
        raise UsageError(
            f"the {planner} planner needs each node's throughput",
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
    able = [node for node in nodes if chain.longest(node) > 0]
    for candidates in (able[: chain.num_layers], able, nodes):
        order = find_order(chain, candidates) if candidates else None
        if order is not None:
            return order
    largest = max(chain.cost.layers, key=lambda layer: layer.held_bytes)
    rooms = []
    for node in nodes:
        longest = chain.longest(node)
        rooms.append(f"{node.name}: {format_size(node.memory_bytes)}, {format_count(longest, 'layer')}")
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
    room = count_room(chain, nodes)
    if chain.is_uniform and room >= 0:
        missing = chain.num_layers - room
        return [
            f"room for {room} of {chain.num_layers} layers beside embedding, head and activations: "
            f"{format_count(missing, 'layer')} of {format_size(cost.layers[0].held_bytes)} too many"
        ]
    return [f"{format_size(total)} in all, but the model does not fit in any order of the nodes"]
