"""Extraction: a node's slice, cut out of a checkpoint along a plan.

| step | call |
|---|---|
| the plan's tensors of one node | `PartitionPlan.read(path, tensors_of=node)` |
| their headers, held against the plan | `StoredWeights.of_slice(model, slice_)` |
| what goes where, nothing copied yet | `cut_slice(plan, node, source)` |
| the slice's folder | `write_slice(cut, output)` |
"""

from __future__ import annotations

from pathlib import Path

from minimax_tools.errors import UsageError
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.cut import FileFormat, SliceCut
from minimax_tools.slices.description import SliceDescription
from minimax_tools.slices.stored_weights import StoredWeights

DEFAULT_FOLDER = Path("model_shards")


def cut_slice(
    plan: PartitionPlan,
    node: str,
    source: StoredWeights,
    *,
    file_format: FileFormat = FileFormat.SAFETENSORS,
    shard_size_bytes: int | None = None,
) -> SliceCut:
    """What the node's slice will hold.

    Args:
        plan: Who holds what; of other nodes the tensors may be left out.
        node: Whose slice.
        source: The checkpoint, or as much of it as the slice needs.
        file_format: As for `SliceCut.of`.
        shard_size_bytes: As for `SliceCut.of`.

    Raises:
        UsageError: The plan has no such node, or the node holds nothing.
        CheckpointError: A tensor of the slice is not in the source.
    """
    slice_ = plan.slice_of(node)
    if not slice_.tensors:
        raise UsageError(
            f"node {node} holds nothing in this plan",
            expected="one of " + ", ".join(used.node.name for used in plan.used),
        )
    description = SliceDescription(
        node=node,
        layers=slice_.stage.layers,
        has_embedding=slice_.stage.has_embedding,
        has_head=slice_.stage.has_head,
        source=source.model,
        tensors=dict.fromkeys(sorted(slice_.names)),
    )
    return SliceCut.of(source, description, file_format=file_format, shard_size_bytes=shard_size_bytes)
