"""Stage: a node and the parts of the model that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from minimax_tools.model.param_mapper import PART_EMBEDDING
from minimax_tools.partition.cost import ModelCost, PartCost
from minimax_tools.partition.node import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A node and the parts of the model that it holds."""

    node: Node
    layers: range  # may be empty
    has_embedding: bool = False
    has_head: bool = False  # final norm, lm_head and all that is neither a layer nor the embedding

    @property
    def is_used(self) -> bool:
        """True if the node holds anything."""
        return bool(self.layers) or self.has_embedding or self.has_head

    def holds(self, part: int | str) -> bool:
        """Decide whether a part of the model belongs to this stage: a layer's number, or a name from `part_of`."""
        if isinstance(part, int):
            return part in self.layers
        return self.has_embedding if part == PART_EMBEDDING else self.has_head


def stage_cost(cost: ModelCost, stage: Stage) -> PartCost:
    """Return the cost of all parts of a stage."""
    return cost.of_slice(stage.layers, has_embedding=stage.has_embedding, has_head=stage.has_head)
