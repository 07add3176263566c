"""Planners: the division of layers among nodes.

| planner | layers are divided |
|---|---|
| `memory` | by memory, the largest node first: all nodes are equally full |
| `compute` | by throughput, the fastest node first: all nodes take equally long |
| `balanced` | so that the slowest node is as fast as possible |
| `manual` | as each node says |

Every planner keeps to the nodes' memory, embedding, head and activations included. All but `manual` find a division
wherever there is one (see `find_order` for the one exception). `memory` and `compute` give each node at least one
layer where enough layers fit. If there are more nodes than layers, the last nodes stay idle. The same nodes and costs
give the same division, in whatever order the nodes are given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from minimax_tools.errors import CannotRunError, UsageError, list_faults
from minimax_tools.machine.size import format_size
from minimax_tools.partition.chain import NodeChain, count_room, divide, find_order
from minimax_tools.partition.cost import PART_EMBEDDING, ModelCost, PartCost
from minimax_tools.partition.node import Node, check_nodes

# Relative precision of the slowest stage's time: far finer than any throughput is known.
_PRECISION = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A node and the parts of the model that it holds.

    Args:
        node: The node.
        layers: Its layers; may be empty.
        has_embedding: True if it holds the embedding.
        has_head: True if it holds the final norm and the lm_head.
    """

    node: Node
    layers: range
    has_embedding: bool = False
    has_head: bool = False

    @property
    def is_used(self) -> bool:
        """True if it holds anything."""
        return bool(self.layers) or self.has_embedding or self.has_head

    def holds(self, part: int | str) -> bool:
        """Decide whether a part of the model, as `part_of` names it, belongs to this stage."""
        if isinstance(part, int):
            return part in self.layers
        return self.has_embedding if part == PART_EMBEDDING else self.has_head


def plan_stages(planner: str, cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    """Return the stages in the order in which a token passes them; idle nodes come last.

    Args:
        planner: One of `PLANNERS`.
        cost: Cost of the model's parts.
        nodes: The nodes.

    Raises:
        UsageError: The planner is unknown, or a node lacks a figure that the planner needs.
        CannotRunError: The nodes cannot hold the model.
    """
    if planner not in PLANNERS:
        raise UsageError(f"no planner {planner!r}", expected="one of " + ", ".join(PLANNERS))
    return PLANNERS[planner](cost, check_nodes(nodes))


def stage_cost(cost: ModelCost, stage: Stage) -> PartCost:
    """Return the cost of all parts of a stage."""
    return cost.of_slice(stage.layers, has_embedding=stage.has_embedding, has_head=stage.has_head)


def _plan_memory(cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    nodes = sorted(nodes, key=lambda node: (node.memory_bytes, node.name), reverse=True)
    return _plan_by_shares(NodeChain(cost), nodes, _targets_by_memory)


def _plan_compute(cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    return _plan_by_shares(NodeChain(cost), _by_speed(nodes, "compute"), _targets_by_speed)


def _plan_by_shares(
    chain: NodeChain, nodes: Sequence[Node], find_targets: Callable[[NodeChain, Sequence[Node]], list[float]]
) -> tuple[Stage, ...]:
    order = _require_order(chain, nodes)
    return _stages(nodes, order, divide(chain, order, find_targets(chain, order)))


def _plan_balanced(cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    nodes = _by_speed(nodes, "balanced")
    chain = NodeChain(cost)
    order = _require_order(chain, nodes)
    runs = divide(chain, order, _targets_by_speed(chain, order))
    slowest = _slowest(chain, order, runs)
    total_speed = sum(node.flops_per_second for node in nodes)
    impossible = cost.whole.flops_per_token / total_speed * (1 - _PRECISION)
    while slowest > impossible * (1 + _PRECISION):
        limited = chain.within((impossible + slowest) / 2)
        faster = find_order(limited, nodes)
        if faster is None:
            impossible = (impossible + slowest) / 2
            continue
        order = faster
        runs = divide(limited, order, _targets_by_speed(chain, order))
        # The division may be faster than the limit.
        slowest = min(slowest, _slowest(chain, order, runs))
    return _stages(nodes, order, runs)


def _plan_manual(cost: ModelCost, nodes: Sequence[Node]) -> tuple[Stage, ...]:
    without = [node.name for node in nodes if node.layers is None]
    if without:
        raise UsageError(
            "the manual planner needs each node's layers",
            found=f"none for {list_faults(without)}",
            next_step="Write --node NAME:memory=40GB,layers=A:B, half-open.",
        )
    runs = sorted(
        ((node, node.layers) for node in nodes if node.layers is not None), key=lambda found: found[1]
    )
    bounds = [0, *(bound for _, span in runs for bound in (span.start, span.stop)), len(cost.layers)]
    if bounds[::2] != bounds[1::2]:
        raise UsageError(
            "these runs do not cover each layer of the model once",
            expected=f"runs that meet, from layer 0 to {len(cost.layers) - 1}",
            found=", ".join(f"{node.name}: {span}" for node, span in runs),
        )
    order = [node for node, _ in runs]
    stages = _stages(nodes, order, [range(span.start, span.stop) for _, span in runs])
    too_large = [
        f"{stage.node.name} needs {format_size(needed)} and has {format_size(stage.node.memory_bytes)}"
        for stage in stages
        if (needed := stage_cost(cost, stage).memory_bytes) > stage.node.memory_bytes
    ]
    if too_large:
        raise CannotRunError(
            "the chosen layers do not fit their nodes",
            found=list_faults(too_large),
            next_step="Give them fewer layers, or let a planner divide: --planner memory.",
        )
    return stages


PLANNERS: Mapping[str, Callable[[ModelCost, Sequence[Node]], tuple[Stage, ...]]] = MappingProxyType(
    {"memory": _plan_memory, "compute": _plan_compute, "balanced": _plan_balanced, "manual": _plan_manual}
)


def _stages(nodes: Sequence[Node], order: Sequence[Node], runs: Sequence[range]) -> tuple[Stage, ...]:
    stages = [
        Stage(node=node, layers=layers, has_embedding=position == 0, has_head=position == len(order) - 1)
        for position, (node, layers) in enumerate(zip(order, runs, strict=True))
    ]
    used = [stage for stage in stages if stage.is_used]
    end = used[-1].layers.stop
    idle = [node for node in nodes if node not in {stage.node for stage in used}]
    return (*used, *(Stage(node=node, layers=range(end, end)) for node in idle))


def _targets_by_memory(chain: NodeChain, order: Sequence[Node]) -> list[float]:
    """Return the end of each node's run if layers could be cut and all nodes were equally full."""
    activations = [chain.activation_bytes] * len(order)
    total = chain.memory[-1] + sum(ends.held_bytes for ends in chain.ends(len(order))) + sum(activations)
    memory = [node.memory_bytes for node in order]
    targets = [
        _position(chain.memory, total * (share / sum(memory)) - chain.cost.embedding.held_bytes - before)
        for share, before in zip(accumulate(memory), accumulate(activations), strict=True)
    ]
    return _round_shares(targets) if chain.is_uniform else targets


def _targets_by_speed(chain: NodeChain, order: Sequence[Node]) -> list[float]:
    """Return the end of each node's run if layers could be cut and all nodes took equally long."""
    total = chain.cost.whole.flops_per_token
    speeds = [node.flops_per_second for node in order]
    targets = [
        _position(chain.flops, total * (share / sum(speeds)) - chain.cost.embedding.flops_per_token)
        for share in accumulate(speeds)
    ]
    return _round_shares(targets) if chain.is_uniform else targets


def _round_shares(targets: Sequence[float]) -> list[float]:
    """Return the targets moved so that each share is a whole number of layers.

    Shares are rounded down, and the layers left over go to the largest fractions. Rounding the targets themselves
    could give a node more layers than a larger node.
    """
    shares = [max(stop - start, 0.0) for start, stop in zip([0.0, *targets], targets, strict=False)]
    whole = [int(share) for share in shares]
    left = round(targets[-1]) - sum(whole)
    by_fraction = sorted(range(len(shares)), key=lambda place: (whole[place] - shares[place], place))
    for place in by_fraction[: max(left, 0)]:
        whole[place] += 1
    return [float(stop) for stop in accumulate(whole)]


def _position(prefix: Sequence[int], value: float) -> float:
    """Return the number of layers, with a fraction, at which the running sum `prefix` reaches `value`."""
    layer = min(max(bisect_right(prefix, value) - 1, 0), len(prefix) - 2)
    size = prefix[layer + 1] - prefix[layer]
    part = (value - prefix[layer]) / size if size else 0.0
    return layer + min(max(part, 0.0), 1.0)


def _by_speed(nodes: Sequence[Node], planner: str) -> list[Node]:
    without = [node.name for node in nodes if node.tflops is None]
    if without:
        raise UsageError(
            f"the {planner} planner needs each node's throughput",
            found=f"none for {list_faults(without)}",
            next_step="Write --node NAME:memory=40GB,tflops=312.",
        )
    return sorted(nodes, key=lambda node: (node.flops_per_second, node.memory_bytes, node.name), reverse=True)


def _slowest(chain: NodeChain, order: Sequence[Node], runs: Sequence[range]) -> float:
    return max(
        chain.seconds(node, layers, ends)
        for node, layers, ends in zip(order, runs, chain.ends(len(order)), strict=True)
    )


def _require_order(chain: NodeChain, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Return an order of nodes that can share the model: only as many as there are layers, where they suffice."""
    able = [node for node in nodes if chain.longest(node)]
    for chosen in (able[: chain.num_layers], able, nodes):
        order = find_order(chain, chosen) if chosen else None
        if order is not None:
            return order
    layer = max(chain.cost.layers, key=lambda layer: layer.held_bytes)
    rooms = [
        f"{node.name}: {format_size(node.memory_bytes)}, {longest} layer{'' if longest == 1 else 's'}"
        for node in nodes
        for longest in (chain.longest(node),)
    ]
    raise CannotRunError(
        f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} cannot hold the model",
        expected=f"room for {format_size(chain.cost.whole.held_bytes)} of weights, keys and values, in pieces of a "
        f"layer ({format_size(layer.held_bytes)}), and on each node {format_size(layer.activation_bytes)} of "
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
            f"{missing} layer{'s' if missing > 1 else ''} of {format_size(cost.layers[0].held_bytes)} too many"
        ]
    return [f"{format_size(total)} in all, but the model does not fit in any order of the nodes"]
