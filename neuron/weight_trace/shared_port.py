"""Shared port: a port's layer that several ranks share, traced and run on all of them together.

Rank 0, the lead, holds a `SharedPort`. It sends each order to the other ranks before it carries out its own part. The
other ranks carry out theirs in `follow_trace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from neuron.devices.runtime import Runtime
from neuron.ports.targets import find_target
from neuron.weight_trace.generated_tensors import Tensors
from neuron.weight_trace.held_check import conclude
from neuron.weight_trace.layout_check import LoadedLayer
from neuron.weight_trace.source_lines import LineTable
from neuron.weight_trace.tensor_origin import TensorOrigin
from neuron.weight_trace.trace_size import ExpertSample
from neuron.weight_trace.traced_port import TracedPort
from neuron.weight_trace.trial import TrialInput, TrialPort


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceAssignment:
    """Values that another rank needs to build its `TracedPort`."""

    folder: Path
    target: str  # the port, as the user named it
    layer: int
    dtype: torch.dtype
    config: Mapping[str, Any]  # config.json of the traced model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialOrder:
    """An order to run the port that was built for the trial."""

    tensors: Tensors
    trial_input: TrialInput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadOrder:
    """An order to load the checkpoint's own layer."""

    config: Mapping[str, Any]  # config.json of the checkpoint's model


# | order | the rank |
# |---|---|
# | `ExpertSample` | traces these experts and sends its origins |
# | `torch.dtype` | builds the port in this dtype |
# | `TrialOrder` | runs the port that it built |
# | `LoadOrder` | loads the checkpoint's layer, and sends what it holds of it |
# | None | ends |
Order = ExpertSample | torch.dtype | TrialOrder | LoadOrder | None


class SharedPort:
    """A port on all ranks, as the lead uses it. Making it sends the other ranks their assignment, if there are any."""

    def __init__(self, port: TracedPort, runtime: Runtime) -> None:
        self.port = port
        self._messages = runtime.messages
        self._messages.send(
            TraceAssignment(
                folder=port.reader.folder,
                target=port.target.name,
                layer=port.layer,
                dtype=port.dtype,
                config=dict(port.spec.raw),
            )
        )

    def trace(self, sample: ExpertSample) -> list[list[TensorOrigin]]:
        """Return the origins of every rank's port tensors, in rank order.

        Raises:
            TargetError: The port cannot be built or loaded in the traced model.
        """
        self._messages.send(sample)
        return self._messages.gather(self.port.trace(sample))

    def prepare_trial(self, dtype: torch.dtype) -> TrialPort:
        """Build the port on all ranks in `dtype`, to run on generated weights.

        Raises:
            TargetError: The port cannot be built.
        """
        self._messages.send(dtype)
        lead = self.port.prepare_trial(dtype)

        def run(tensors: Tensors, trial_input: TrialInput) -> torch.Tensor:
            if self.port.ranks.are_several:
                # Functions that make tensors on access cannot be sent: the tensors are made now.
                tensors = dict(tensors)
            self._messages.send(TrialOrder(tensors=tensors, trial_input=trial_input))
            return lead.run(tensors, trial_input)

        return TrialPort(
            run=run,
            computes_in_bf16=lead.computes_in_bf16,
            # The other ranks hold parts of the tensors, and none is told what to overwrite.
            run_refilled=None if self.port.ranks.are_several else lead.run_refilled,
        )

    def load_checkpoint(self, spec: ModelSpec) -> LoadedLayer:
        """Load the checkpoint's own layer on all ranks; `spec` is of the checkpoint's model.

        Raises:
            CheckpointError: The layer cannot be read.
            TargetError: The port cannot be built or loaded.
        """
        self._messages.send(LoadOrder(config=dict(spec.raw)))
        part, port_tensors = self.port.load_checkpoint(spec)
        return LoadedLayer(
            held=conclude(self._messages.gather(part), LineTable(spec)),
            port_tensors=port_tensors,
            source=LayerTensors.open(self.port.reader, spec, self.port.layer, self.port.dtype),
        )

    def dismiss(self) -> None:
        """Tell the other ranks that no order follows."""
        self._messages.send(None)


def follow_trace(assignment: TraceAssignment, runtime: Runtime) -> None:
    """Carry out the lead's orders on another rank, until the lead dismisses it.

    Raises:
        Mm2Error: An order failed on this rank. That ends the inspection on all ranks.
    """
    with (
        CheckpointReader(assignment.folder, layers=range(assignment.layer, assignment.layer + 1)) as reader,
        ReadingPool(torch.get_num_threads()) as pool,
    ):
        port = TracedPort(
            target=find_target(assignment.target),
            spec=ModelSpec.from_config(assignment.config),
            layer=assignment.layer,
            dtype=assignment.dtype,
            reader=reader,
            ranks=runtime.ranks,
            pool=pool,
        )
        trial: TrialPort | None = None
        order: Order
        while (order := runtime.messages.receive()) is not None:
            if isinstance(order, ExpertSample):
                runtime.messages.gather(port.trace(order))
            elif isinstance(order, torch.dtype):
                trial = port.prepare_trial(order)
            elif isinstance(order, LoadOrder):
                runtime.messages.gather(port.load_checkpoint(ModelSpec.from_config(order.config))[0])
            else:
                assert trial is not None, "a port is built before it runs"
                trial.run(order.tensors, order.trial_input)
