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
    """Describe each node of a plan by memory that has too many layers, while another has too few and room for one.

    A node has too many if it is more than 1.5 layers above its share of the memory. It is no fault if the planner, run
    again, gives the node as many: a large embedding, or one layer for each node, can force that. `costs` are those of
    the slices, in the plan's order, and `cost` that of the model's parts.
    """
    largest = max(cost.layers, key=lambda part: part.held_bytes)
    # As the planner counts: every used node has one layer's activations, and the logits of the last node are left out.
    held_bytes = [
        part.held_bytes + (largest.activation_bytes if slice_.stage.is_used else 0)
        for slice_, part in zip(plan.slices, costs, strict=True)
    ]
    total_memory_bytes = sum(slice_.node.memory_bytes for slice_ in plan.slices)
    givers, takers = [], []
    for slice_, part, held in zip(plan.slices, costs, held_bytes, strict=True):
        share = sum(held_bytes) * slice_.node.memory_bytes / total_memory_bytes
        # At least 1, so that layers without weights do not divide by zero.
        excess_layers = (held - share) / max(largest.held_bytes, 1)
        has_room = (part + largest).memory_bytes <= slice_.node.memory_bytes
        if excess_layers > _MAX_EXCESS_LAYERS and slice_.stage.is_used:
            givers.append((slice_, excess_layers))
        elif excess_layers < -_MAX_EXCESS_LAYERS and has_room:
            takers.append((slice_.node.name, -excess_layers))
    if not takers or not givers:
        return []
    replanned = _plan_again(plan, cost)
    taker, missing_layers = takers[0]
    return [
        f"{slice_.node.name} has {excess_layers:.1f} layers more than its share of the memory, while {taker} has "
        f"{missing_layers:.1f} less and room for one"
        for slice_, excess_layers in givers
        if len(slice_.stage.layers) > replanned.get(slice_.node.name, 0)
    ]


def _plan_again(plan: PartitionPlan, cost: ModelCost) -> dict[str, int]:
    """Return the number of layers that the planner gives each node; empty if it cannot plan."""
    try:
        stages = plan_stages(plan.planner, cost, [slice_.node for slice_ in plan.slices])
    except (UsageError, CannotRunError):
        return {}
    return {stage.node.name: len(stage.layers) for stage in stages}
