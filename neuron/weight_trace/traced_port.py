"""Traced port: a port's layer on the CPU, traced and run on all ranks that share it.

The lead holds a `SharedPort`. It sends each order to the other ranks before it carries out its part. The others carry
out theirs in `follow_trace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expected_layer_shapes
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader
from neuron.ports.port_errors import port_errors
from neuron.ports.returned import find_output
from neuron.ports.target import Target
from neuron.ports.targets import find_target
from neuron.weight_trace.generated_tensors import GeneratedTensors, Make, Tensors
from neuron.weight_trace.loaded_check import LoadedPort
from neuron.weight_trace.origin_tracer import OriginTracer
from neuron.weight_trace.port_tensors import find_port_tensors
from neuron.weight_trace.tensor_origin import TensorOrigin
from neuron.weight_trace.trace_size import ExpertSample
from neuron.weight_trace.trial import TrialInput, TrialPort

# Larger tensors are not copied before loading. A larger one of zeros is then reported as zero, not as never bound.
_MAX_COPIED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedPort:
    """A rank's part of a port's layer.

    Args:
        spec: The traced model.
    """

    target: Target
    spec: ModelSpec
    layer: int
    dtype: torch.dtype
    reader: CheckpointReader
    ranks: Ranks
    pool: ReadingPool

    def trace(self, sample: ExpertSample) -> list[TensorOrigin]:
        """Return the origin of every port tensor.

        Raises:
            TargetError: The port cannot be built or loaded in the traced model.
        """
        module = self._build(self.spec, self.dtype)

        def load(make: Make) -> dict[str, torch.Tensor]:
            self._load_generated(module, make, self.dtype)
            return find_port_tensors(module)

        return OriginTracer(sample.sources(self.spec), expected_layer_shapes(self.spec), load).trace()

    def prepare_trial(self, dtype: torch.dtype) -> TrialPort:
        """Build the port in a dtype, to run on generated weights.

        Raises:
            TargetError: It cannot be built.
        """
        module = self._build(self.spec, dtype)

        def run(tensors: Tensors, trial_input: TrialInput) -> torch.Tensor:
            what = f"target {self.target.name}, layer {self.layer}"
            self._load_generated(module, tensors.__getitem__, dtype)
            failed, step = f"{what} failed while it ran", "See --debug for the traceback."
            activity = f"running layer {self.layer} of target {self.target.name} on generated weights"
            # The port gets copies: it may change its input in place.
            with torch.no_grad(), port_errors(failed, activity=activity, next_step=step):
                result = module(
                    trial_input.hidden_states.to(dtype, copy=True),
                    trial_input.attention_mask.clone(),
                    trial_input.position_ids.clone(),
                )
            return find_output(result, tuple(trial_input.hidden_states.shape), what=what)

        return TrialPort(
            run=run,
            computes_in_bf16=any(parameter.dtype.itemsize == 2 for parameter in module.parameters()),
        )

    def load_checkpoint(self, spec: ModelSpec) -> LoadedPort:
        """Load the checkpoint's own layer, of `spec`, into the port.

        Raises:
            CheckpointError: The layer cannot be read.
            TargetError: The port cannot be built or loaded.
        """
        module = self._build(spec, self.dtype)
        before = {
            name: tensor.clone()
            for name, tensor in find_port_tensors(module).items()
            if tensor.numel() <= _MAX_COPIED
        }
        source = LayerTensors.open(self.reader, spec, self.layer, self.dtype)
        # The port may remove what it reads from its mapping.
        self._load(module, source.copy(), spec)
        return LoadedPort(port_tensors=find_port_tensors(module), before=before, source=source)

    def _build(self, spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
        return self.target.build(spec, self.layer, dtype=dtype, ranks=self.ranks)

    def _load_generated(self, module: nn.Module, make: Make, dtype: torch.dtype) -> None:
        tensors = GeneratedTensors(self.spec, layer=self.layer, dtype=dtype, make=make, reader=self.reader)
        self._load(module, tensors, self.spec)

    def _load(self, module: nn.Module, tensors: LayerTensors, spec: ModelSpec) -> None:
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=self.pool)
        self.target.load(module, tensors, spec, loader=loader, ranks=self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceAssignment:
    """Values that a rank needs before it traces.

    Args:
        folder: The checkpoint.
        target: The port, as the user named it.
        config: config.json of the traced model.
    """

    folder: Path
    target: str
    layer: int
    dtype: torch.dtype
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialOrder:
    """An order to run the port that was built, on some weights and input."""

    tensors: Tensors
    trial_input: TrialInput


# Trace a sample and send its origins; build the port in a dtype; run it; None: no order follows.
Order = ExpertSample | torch.dtype | TrialOrder | None


class SharedPort:
    """A port on all ranks, as the lead uses it; on one rank there are no others."""

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
        """Return the origin of every port tensor of every rank.

        Raises:
            TargetError: As for `TracedPort.trace`.
        """
        self._messages.send(sample)
        return self._messages.gather(self.port.trace(sample))

    def prepare_trial(self, dtype: torch.dtype) -> TrialPort:
        """Build the port on all ranks, in a dtype, to run on generated weights.

        Raises:
            TargetError: It cannot be built.
        """
        self._messages.send(dtype)
        lead = self.port.prepare_trial(dtype)

        def run(tensors: Tensors, trial_input: TrialInput) -> torch.Tensor:
            if self.port.ranks.are_several:
                # Tensors made on access cannot be sent.
                tensors = dict(tensors)
            self._messages.send(TrialOrder(tensors=tensors, trial_input=trial_input))
            return lead.run(tensors, trial_input)

        return TrialPort(run=run, computes_in_bf16=lead.computes_in_bf16)

    def dismiss(self) -> None:
        """Tell the other ranks that no order follows."""
        self._messages.send(None)


def follow_trace(assignment: TraceAssignment, runtime: Runtime) -> None:
    """Carry out the lead's orders on another rank, until it dismisses.

    Raises:
        Mm2Error: As on the lead, whose inspection it ends.
    """
    with (
        # No shard need be here: this rank generates all values.
        CheckpointReader(assignment.folder, layers=range(0)) as reader,
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
            else:
                assert trial is not None, "a port is built before it runs"
                trial.run(order.tensors, order.trial_input)
