"""The headers of one slice: all that a rank may read of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from minimax_tools.checkpoint.architecture import Architecture
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.spec import ModelSpec


def read_slice_index(folder: Path, part: Slice) -> TensorIndex:
    """The index of a slice's tensors, and of no others.

    Args:
        folder: The whole checkpoint's, which may lack shards of other slices; or the slice's own.
        part: The slice.

    Raises:
        CheckpointError: Tensors of the slice are missing, or the folder's shards have faults.
    """
    index = TensorIndex.from_folder(folder, layers=part.stage.layers)
    missing = [name for name in part.names if name not in index]
    if missing:
        raise CheckpointError(
            f"{folder} lacks tensors of node {part.node.name}'s slice",
            found=list_faults(missing),
            next_step="Check that the plan is this checkpoint's (mm2-split plan), or fetch the slice: mm2-split fetch.",
        )
    own = frozenset(part.names)
    entries = {name: entry for name, entry in index.entries.items() if name in own}
    return TensorIndex(folder=folder, entries=MappingProxyType(entries))


def validate_plan(plan: PartitionPlan, folder: Path, spec: ModelSpec, part: Slice, *, is_slice: bool) -> None:
    """Check a plan against a checkpoint: against all of its tensors where their headers are here.

    Args:
        plan: The plan.
        folder: The checkpoint's, or a slice's own.
        spec: The checkpoint's quantities.
        part: The slice that will be read.
        is_slice: Whether `folder` is the slice's own; that it is whole shows when it is opened.

    Raises:
        CheckpointError: The plan is not whole, or not this checkpoint's; all faults are listed.
    """
    architecture = replace(Architecture.of(plan.model_type), num_layers=spec.num_hidden_layers)
    if plan.num_hidden_layers != spec.num_hidden_layers:
        raise CheckpointError(
            f"the plan for {plan.model} is not for the checkpoint in {folder}",
            expected=f"{plan.num_hidden_layers} layers",
            found=f"{spec.num_hidden_layers}",
            next_step="Give --model the checkpoint that was planned for, or plan anew: mm2-split plan.",
        )
    index = None if is_slice else TensorIndex.from_folder(folder, layers=part.stage.layers)
    entries = None if index is None or index.absent else index.entries
    plan.validate(entries, architecture, folder=folder)
