"""Extraction: a node's slice, cut out of a checkpoint along a plan.

| step | call |
|---|---|
| what goes where, nothing copied yet | `cut_slice(plan, node, source)` |
| the slice's folder | `write_slice(cut, output)` |
"""

from __future__ import annotations

from pathlib import Path

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError, UsageError, list_faults
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.partition.slice_cut import FileFormat, SliceCut
from minimax_tools.partition.slice_file import SliceDescription
from minimax_tools.partition.source import Source

DEFAULT_FOLDER = Path("model_shards")


def cut_slice(
    plan: PartitionPlan,
    node: str,
    source: Source,
    *,
    file_format: FileFormat = FileFormat.SAFETENSORS,
    shard_size_bytes: int | None = None,
) -> SliceCut:
    """What the node's slice will hold, after the whole plan was held against the source's headers.

    Args:
        plan: Who holds what.
        node: Whose slice.
        source: The checkpoint, its weights at hand.
        file_format: As for `SliceCut.of`.
        shard_size_bytes: As for `SliceCut.of`.

    Raises:
        UsageError: The plan has no such node, or the node holds nothing.
        CheckpointError: The plan is not whole or not this checkpoint's, with every fault; or no weights are here.
    """
    slice_ = plan.slice_of(node)
    if not slice_.tensors:
        raise UsageError(
            f"node {node} holds nothing in this plan",
            expected="one of " + ", ".join(used.node.name for used in plan.used),
        )
    _check_plan(plan, slice_, source)
    description = SliceDescription(
        node=node,
        layers=slice_.stage.layers,
        has_embedding=slice_.stage.has_embedding,
        has_head=slice_.stage.has_head,
        source=source.model,
        tensors=dict.fromkeys(sorted(slice_.names)),
    )
    return SliceCut.of(source, description, file_format=file_format, shard_size_bytes=shard_size_bytes)


def _check_plan(plan: PartitionPlan, slice_: Slice, source: Source) -> None:
    """Hold the plan against all headers that are known, at least against those of the slice."""
    with source.open() as reader:
        index = reader.index
    faults = plan.find_faults(source.entries, source.architecture, folder=source.folder)
    if source.entries is None:
        faults += _find_slice_faults(slice_, index)
    if faults:
        raise CheckpointError(
            f"the plan for {plan.model} has {len(faults)} fault{'s' if len(faults) > 1 else ''} for {source.model}",
            found=list_faults(faults),
            next_step="Fetch what is missing (mm2-split fetch), or make the plan anew: mm2-split plan.",
        )


def _find_slice_faults(slice_: Slice, index: TensorIndex) -> list[str]:
    """What is wrong with a slice in a folder that lacks shards of others."""
    faults = []
    for tensor in slice_.tensors:
        if tensor.name in index.absent:
            faults.append(f"{tensor.name} lies in {index.absent[tensor.name]}, which is not here")
        elif tensor.name not in index:
            faults.append(f"node {slice_.node.name} holds {tensor.name}, which the checkpoint lacks")
        elif tensor.file is not None and (tensor.start, tensor.size_bytes) != (
            index[tensor.name].offset,
            index[tensor.name].size_bytes,
        ):
            faults.append(
                f"{tensor.name} does not lie at bytes {tensor.start} to {tensor.stop} of {tensor.file}"
            )
    return faults
