"""The steps of a plan: the work of each rank, as far as it is not stored yet; and the check of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError
from minimax_tools.model.architecture import Architecture
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.node import Stage
from minimax_tools.partition.plan import PartitionPlan, Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The work of one rank."""

    layers: range  # layers to run: the stage's, from the first that is not stored; may be none
    runs_head: bool  # whether the final norm and the lm_head run
    source: str  # source of the first layer's input: `tokens`, `stored`, or `rank` for the rank before
    passes_on: bool  # whether the next rank needs the output

    @property
    def is_idle(self) -> bool:
        """True if the rank has nothing to do."""
        return not (self.layers or self.runs_head or self.passes_on)


def plan_steps(
    stages: Sequence[Stage], complete: Sequence[int], *, has_model_sites: bool
) -> tuple[Step, ...]:
    """Return the step of every rank. All ranks compute the same steps.

    Args:
        stages: Stage of each rank, in the order in which a token passes them.
        complete: Numbers of the layers that are stored whole.
        has_model_sites: Whether the sites outside the layers are stored.
    """
    steps: list[Step] = []
    # From the last rank to the first: a rank passes its output on if the next one waits for it.
    is_needed_next = False
    for stage in reversed(stages):
        pending = [layer for layer in stage.layers if layer not in complete]
        first = pending[0] if pending else stage.layers.stop
        if first == 0 and stage.has_embedding:
            source = "tokens"
        elif first - 1 in complete:
            source = "stored"
        else:
            source = "rank"
        step = Step(
            layers=range(first, stage.layers.stop),
            runs_head=stage.has_head and not has_model_sites,
            source=source,
            passes_on=is_needed_next,
        )
        is_needed_next = not step.is_idle and source == "rank"
        steps.append(step)
    return tuple(reversed(steps))


def validate_plan(plan: PartitionPlan, folder: Path, spec: ModelSpec, part: Slice, *, is_slice: bool) -> None:
    """Check a plan against a checkpoint: against its config.json and, if all headers are here, all its tensors.

    If `is_slice`, `folder` holds the slice `part` alone. Opening the slice then shows whether it is whole.

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
