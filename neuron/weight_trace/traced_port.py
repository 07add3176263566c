"""Traced port: one rank's part of a port's layer on the CPU: traced, run on generated weights, loaded.

To trace is to load generated weights, and find from which of the checkpoint's elements the port's own come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FLOAT32_NAMES, expected_layer_shapes, layer_bytes
from neuron.devices.ranks import Ranks
from neuron.devices.weights import WeightLoader
from neuron.ports.returned import find_output
from neuron.ports.target import Target, port_errors
from neuron.weight_trace.generated_tensors import GeneratedTensors, MakeTensor, Tensors
from neuron.weight_trace.held_check import HeldPart, check_part
from neuron.weight_trace.origin_tracer import OriginTracer
from neuron.weight_trace.port_tensors import find_port_tensors
from neuron.weight_trace.source_lines import LineTable, NotedTensors, PortLines
from neuron.weight_trace.tensor_origin import TensorOrigin
from neuron.weight_trace.trace_size import ExpertSample, WideAllocations
from neuron.weight_trace.trial import TrialInput, TrialPort

# A conversion of a larger layer is not measured: all tensors of the layer are in memory at once.
_MOST_MEASURED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedPort:
    """A rank's part of a port's layer."""

    target: Target  # the port
    spec: ModelSpec  # the traced model; it may be smaller than the checkpoint's
    layer: int
    dtype: torch.dtype  # dtype of the run, in which the port is traced and loaded
    reader: CheckpointReader
    ranks: Ranks
    pool: ReadingPool  # threads that fill parameters

    def trace(self, sample: ExpertSample) -> list[TensorOrigin]:
        """Return the origin of every port tensor, but for those that hold only experts outside the sample.

        Raises:
            TargetError: The port cannot be built or loaded in the traced model.
        """
        module = self._build(self.spec, self.dtype)

        def load(make: MakeTensor) -> dict[str, torch.Tensor]:  # `make`: a tensor's values by its name
            self._load_generated(module, make, self.dtype)
            return find_port_tensors(module)

        sources, shapes = sample.sources(self.spec), expected_layer_shapes(self.spec)
        return OriginTracer(sources, shapes, load, pool=self.pool).trace()

    def prepare_trial(self, dtype: torch.dtype) -> TrialPort:
        """Build the port in `dtype`, to run on generated weights.

        Raises:
            TargetError: The port cannot be built.
        """
        module = self._build(self.spec, dtype)

        def run(
            tensors: Tensors, trial_input: TrialInput, refills: Mapping[str, str] = MappingProxyType({})
        ) -> torch.Tensor:
            port = f"port {self.target.name}, layer {self.layer}"
            self._load_generated(module, tensors.__getitem__, dtype)
            held = find_port_tensors(module)
            for name, source in refills.items():
                held[name].copy_(tensors[source])
            errors = port_errors(
                f"{port} failed while it ran",
                activity=f"running layer {self.layer} of port {self.target.name} on generated weights",
                next_step="See --debug for the traceback.",
            )
            # The port gets copies: it may change its input in place.
            with torch.no_grad(), errors:
                result = module(
                    trial_input.hidden_states.to(dtype, copy=True),
                    trial_input.attention_mask.clone(),
                    trial_input.position_ids.clone(),
                )
            return find_output(result, tuple(trial_input.hidden_states.shape), what=port)

        return TrialPort(
            run=run,
            computes_in_bf16=any(parameter.dtype.itemsize == 2 for parameter in module.parameters()),
            run_refilled=run,
        )

    def measure_conversion(self) -> int | None:
        """Return the most bytes of float32 temporaries that the conversion holds at once; None for a large layer.

        Raises:
            TargetError: The port cannot be built or loaded.
        """
        if layer_bytes(self.spec, self.dtype) > _MOST_MEASURED_BYTES:
            return None
        module = self._build(self.spec, self.dtype)
        # Made beforehand, in the dtypes that a conversion gets: else their making would count.
        given = {
            name: torch.rand(shape).to(torch.float32 if name in FLOAT32_NAMES else self.dtype)
            for name, shape in expected_layer_shapes(self.spec).items()
        }
        with WideAllocations() as allocations:
            self._load_generated(module, given.__getitem__, self.dtype)
        peak_bytes: int = allocations.peak_bytes
        return peak_bytes

    def load_checkpoint(self, spec: ModelSpec) -> tuple[HeldPart, Mapping[str, torch.Tensor]]:
        """Load the checkpoint's own layer into the port, built for the checkpoint's `spec`.

        Returns:
            What this rank holds of it, and all tensors that it holds, by name.

        Raises:
            CheckpointError: The layer cannot be read.
            TargetError: The port cannot be built or loaded.
        """
        module = self._build(spec, self.dtype)
        tensors = NotedTensors.noting(self.reader, spec, self.layer, self.dtype, table=LineTable(spec))
        self._load(module, tensors, spec)
        part = check_part(module, tensors, sent=PortLines(spec), pool=self.pool)
        return part, find_port_tensors(module)

    def _build(self, spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
        return self.target.build(spec, self.layer, dtype=dtype, ranks=self.ranks)

    def _load_generated(self, module: nn.Module, make: MakeTensor, dtype: torch.dtype) -> None:
        tensors = GeneratedTensors(self.spec, layer=self.layer, dtype=dtype, make=make, reader=self.reader)
        self._load(module, tensors, self.spec)

    def _load(self, module: nn.Module, tensors: LayerTensors, spec: ModelSpec) -> None:
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=self.pool)
        self.target.load(module, tensors, spec, loader=loader, ranks=self.ranks)
