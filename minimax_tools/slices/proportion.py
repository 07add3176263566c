"""The proportion of slices to their nodes' memory, recounted from the model's parts."""

from __future__ import annotations

from collections.abc import Sequence

from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.partition.cost import ModelCost, PartCost
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.partition.planners import plan_stages

# Rounding moves a share by up to half a layer; one layer more is tolerated.
_MAX_EXCESS_LAYERS = 1.5


def recount(slice_: Slice, cost: ModelCost) -> PartCost:
    """Return the cost of a slice by the model's parts; layers that the model lacks cost nothing."""
    stage = slice_.stage
    layers = range(max(stage.layers.start, 0), min(stage.layers.stop, len(cost.layers)))
    return cost.of_slice(layers, has_embedding=stage.has_embedding, has_head=stage.has_head)


def find_disproportions(plan: PartitionPlan, costs: Sequence[PartCost], cost: ModelCost) -> list[str]:
    """Describe each node that has too many layers for its memory, while another has too few and room for one.

    A node has too many if it is more than 1.5 layers above its share of the memory. It is no fault if the planner, run
    again, gives the node as many: a large embedding, or one layer for each node, can force that.

    Args:
        plan: The plan.
        costs: Cost of each slice.
        cost: Cost of the model's parts.
    """
    largest = max(cost.layers, key=lambda part: part.held_bytes)
    # The planner charges each used node for one layer's activations; the logits come and go.
    held = [
        part.held_bytes + (largest.activation_bytes if slice_.stage.is_used else 0)
        for slice_, part in zip(plan.slices, costs, strict=True)
    ]
    memory = sum(slice_.node.memory_bytes for slice_ in plan.slices)
    # Above each node's share of the memory.
    excess_layers = [
        (held_bytes - sum(held) * slice_.node.memory_bytes / memory) / max(largest.held_bytes, 1)
        for slice_, held_bytes in zip(plan.slices, held, strict=True)
    ]
    takers = [
        (slice_.node.name, -layers)
        for slice_, part, layers in zip(plan.slices, costs, excess_layers, strict=True)
        if layers < -_MAX_EXCESS_LAYERS and (part + largest).memory_bytes <= slice_.node.memory_bytes
    ]
    givers = [
        (slice_, layers)
        for slice_, layers in zip(plan.slices, excess_layers, strict=True)
        if layers > _MAX_EXCESS_LAYERS and slice_.stage.is_used
    ]
    if not takers or not givers:
        return []
    replanned = _plan_again(plan, cost)
    taker, missing = takers[0]
    return [
        f"{slice_.node.name} has {layers:.1f} layers more than its share of the memory, while {taker} has "
        f"{missing:.1f} less and room for one"
        for slice_, layers in givers
        if len(slice_.stage.layers) > replanned.get(slice_.node.name, 0)
    ]


def _plan_again(plan: PartitionPlan, cost: ModelCost) -> dict[str, int]:
    """Return the number of layers that the planner gives each node; empty if it cannot plan."""
    try:
        stages = plan_stages(plan.planner, cost, [slice_.node for slice_ in plan.slices])
    except (UsageError, CannotRunError):
        return {}
    return {stage.node.name: len(stage.layers) for stage in stages}
