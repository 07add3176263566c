"""Following: what a rank other than the lead does, from its first assignment to the last."""

from __future__ import annotations

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.spec import ModelSpec
from neuron.devices.runtime import Runtime
from neuron.ports.targets import find_target
from neuron.runs.executor import LayerExecutor
from neuron.runs.orders import Assignment
from neuron.weight_trace.shared_port import TraceAssignment, follow_trace

# The lead has looked at the checkpoint, and names the layers that are there.
_NO_LAYERS = range(0)


def follow(runtime: Runtime) -> None:
    """Build, load and run this rank's part of every layer that the lead names, until it names no more.

    Raises:
        Mm2Error: As for the lead, whose run it ends.
    """
    while (assignment := runtime.messages.receive()) is not None:
        if isinstance(assignment, TraceAssignment):
            follow_trace(assignment, runtime)
            continue
        assert isinstance(assignment, Assignment), "an assignment comes before its orders"
        _carry_out(assignment, runtime)


def _carry_out(assignment: Assignment, runtime: Runtime) -> None:
    spec, target = ModelSpec.from_folder(assignment.folder), find_target(assignment.target)
    with (
        CheckpointReader(assignment.folder, layers=_NO_LAYERS) as reader,
        LayerExecutor(
            target=target,
            runtime=runtime,
            reader=reader,
            spec=spec,
            dtype=assignment.dtype,
            inputs=assignment.inputs,
            budget=MemoryBudget(assignment.budget_bytes),
            # What the lead fetches from the disk lies in the page cache of all.
            prefetch=False,
        ) as executor,
    ):
        executor.follow()
