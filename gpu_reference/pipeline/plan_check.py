"""Whether a plan is a checkpoint's, as far as its headers are here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError
from minimax_tools.model.architecture import Architecture
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.plan import PartitionPlan, Slice


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
