"""The work of a rank other than the lead: it runs its part of every layer that the lead runs."""

from __future__ import annotations

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.spec import ModelSpec
from neuron.devices.runtime import Runtime
from neuron.ports.targets import find_target
from neuron.runs.device_request import PortSetup
from neuron.runs.executor import Assignment, LayerExecutor
from neuron.weight_trace.shared_port import TraceAssignment, follow_trace

# The lead has checked the shards, and names only layers that are there.
_NO_LAYERS = range(0)


def follow(runtime: Runtime) -> None:
    """Carry out the lead's assignments, one after the other, until it sends None.

    Raises:
        Mm2Error: As on the lead, whose run it ends.
    """
    while (assignment := runtime.messages.receive()) is not None:
        if isinstance(assignment, TraceAssignment):
            follow_trace(assignment, runtime)
            continue
        assert isinstance(assignment, Assignment), "an assignment comes before its requests"
        setup = PortSetup(
            target=find_target(assignment.target),
            spec=ModelSpec.from_folder(assignment.folder),
            model_source=str(assignment.folder),
            dtype=assignment.dtype,
            inputs=assignment.inputs,
            # The lead reads from the disk into the page cache of all.
            prefetch=False,
            budget=MemoryBudget(assignment.budget_bytes),
        )
        with (
            CheckpointReader(assignment.folder, layers=_NO_LAYERS) as reader,
            LayerExecutor(setup, runtime=runtime, reader=reader) as executor,
        ):
            executor.follow()
