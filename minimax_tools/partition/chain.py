"""NodeChain: the layers of a model in a row, and which runs of them fit a node.

A run is a range of consecutive layers. Each node gets one run. The *ends* of the model lie beside it: the first node
also holds the embedding, the last one the head (final norm, lm_head and the rest). A run fits a node that has the
memory for it and, if there is a time limit, computes a token within it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
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
