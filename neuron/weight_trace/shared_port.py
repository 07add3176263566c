"""SharedPort: a port's layer on all ranks that share it, as the lead traces and runs it; the others follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from neuron.devices.runtime import Runtime
from neuron.ports.targets import find_target
from neuron.weight_trace.exchanges import Tensors
from neuron.weight_trace.origin import Origin
from neuron.weight_trace.port import LoadedPort, TracedPort
from neuron.weight_trace.sample import Sample
from neuron.weight_trace.trial import TrialInput, TrialPort

_NO_LAYERS = range(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceAssignment:
    """What a rank must know before it traces.

    Args:
        folder: The checkpoint.
        target: The port, as the user named it.
        layer: The layer.
        dtype: The run's dtype.
        config: config.json of the model that is traced.
    """

    folder: Path
    target: str
    layer: int
    dtype: torch.dtype
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOrder:
    """Trace, following some experts, and give what was found."""

    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOrder:
    """Build the port in that dtype, to be run."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialOrder:
    """Run the port that was built, on these tensors and this input."""

    tensors: Tensors
    given: TrialInput


class SharedPort:
    """What the lead does with a port; alone, it is the one rank.

    Args:
        port: The lead's own part.
        runtime: The ranks.
        traced: The model that is traced.
    """

    def __init__(self, port: TracedPort, runtime: Runtime, traced: ModelSpec) -> None:
        self.port = port
        self.traced = traced
        self._crew = runtime.crew
        assignment = TraceAssignment(
            folder=port.reader.folder,
            target=port.target.name,
            layer=port.layer,
            dtype=port.dtype,
            config=dict(traced.raw),
        )
        self._crew.tell(assignment)

    def trace(self, sample: Sample) -> list[list[Origin]]:
        """Where the elements of every place of every rank come from, as far as their experts are followed.

        Raises:
            TargetError: As for `TracedPort.trace`.
        """
        self._crew.tell(TraceOrder(sample=sample))
        return self._crew.gather(self.port.trace(self.traced, sample))

    def prepare_trial(self, dtype: torch.dtype) -> TrialPort:
        """The port on all ranks, built in that dtype to be run on made weights.

        Raises:
            TargetError: It cannot be built.
        """
        self._crew.tell(BuildOrder(dtype=dtype))
        own = self.port.prepare_trial(self.traced, dtype)

        def run(tensors: Tensors, given: TrialInput) -> torch.Tensor:
            if self.port.ranks.degree > 1:
                # What is made at access cannot travel.
                tensors = dict(tensors)
            self._crew.tell(TrialOrder(tensors=tensors, given=given))
            return own.run(tensors, given)

        return TrialPort(run=run, computes_in_bf16=own.computes_in_bf16)

    def load(self, spec: ModelSpec) -> LoadedPort:
        """The lead's part with the checkpoint's own layer in it.

        Raises:
            CheckpointError: The layer cannot be read.
            TargetError: The port cannot be built or loaded.
        """
        return self.port.load(spec)

    def dismiss(self) -> None:
        """Tell the others that nothing more comes."""
        self._crew.tell(None)


def follow_trace(assignment: TraceAssignment, runtime: Runtime) -> None:
    """Do what the lead does with a port, on another rank.

    Raises:
        Mm2Error: As for the lead, whose inspection it ends.
    """
    traced = ModelSpec.from_config(assignment.config)
    with (
        CheckpointReader(assignment.folder, layers=_NO_LAYERS) as reader,
        ReadingPool(torch.get_num_threads()) as pool,
    ):
        port = TracedPort(
            target=find_target(assignment.target),
            layer=assignment.layer,
            dtype=assignment.dtype,
            reader=reader,
            ranks=runtime.ranks,
            pool=pool,
        )
        trial: TrialPort | None = None
        while (order := runtime.crew.hear()) is not None:
            if isinstance(order, TraceOrder):
                runtime.crew.gather(port.trace(traced, order.sample))
            elif isinstance(order, BuildOrder):
                trial = port.prepare_trial(traced, order.dtype)
            else:
                assert trial is not None, "a port is built before it runs"
                trial.run(order.tensors, order.given)
