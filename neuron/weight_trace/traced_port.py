"""Traced port: a port's layer on the CPU, traced, run on generated weights and loaded.

To trace is to load generated weights, and find from which of the checkpoint's elements the port's own come. Several
ranks may share the layer, each with a `TracedPort`. What rank 0, the lead, does with its own, the other ranks do with
theirs: they wait for that in `follow_trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FLOAT32_NAMES, expected_layer_shapes, layer_bytes
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader
from neuron.ports.returned import find_output
from neuron.ports.target import Target, port_errors
from neuron.ports.targets import find_target
from neuron.weight_trace.generated_tensors import GeneratedTensors, MakeTensor, Tensors
from neuron.weight_trace.held_check import HeldPart, check_part
from neuron.weight_trace.origin_tracer import OriginTracer
from neuron.weight_trace.port_tensors import find_port_tensors
from neuron.weight_trace.source_lines import LineTable, NotedTensors, PortLines
from neuron.weight_trace.source_tensors import TensorOrigin
from neuron.weight_trace.trace_size import ExpertSample, WideAllocations

# A conversion of a larger layer is not measured: all tensors of the layer are in memory at once.
_MOST_MEASURED_BYTES = 256 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class TracedPort:
    """A rank's part of a port's layer. All methods raise TargetError if the port cannot be built, loaded or run.

    Lists of what each rank returns are in rank order, and empty on other ranks than the lead.
    """

    target: Target  # the port
    spec: ModelSpec  # the traced model; it may be smaller than the checkpoint's
    layer: int
    dtype: torch.dtype  # dtype of the run, in which the port is traced and loaded
    reader: CheckpointReader
    runtime: Runtime
    pool: ReadingPool  # threads that fill parameters
    # The module that was built for the trial, and its dtype.
    _trial: tuple[nn.Module, torch.dtype] | None = field(init=False, default=None)
    # What `load_checkpoint` loaded, by name.
    loaded: Mapping[str, torch.Tensor] = field(init=False, default_factory=dict)

    @contextmanager
    def on_all_ranks(self) -> Iterator[None]:
        """Let the other ranks build their part of the port, and follow this one until the block ends."""
        assignment = TraceAssignment(
            folder=self.reader.folder,
            target=self.target.name,
            layer=self.layer,
            dtype=self.dtype,
            config=dict(self.spec.raw),
        )
        self.runtime.messages.send(assignment)
        yield
        self.runtime.messages.send(None)

    def trace(self, sample: ExpertSample) -> list[list[TensorOrigin]]:
        """Return the origins of every rank's port tensors, but for those that hold only experts outside the sample."""
        self._share(partial(TracedPort.trace, sample=sample))
        module = self._build(self.spec, self.dtype)

        def load(make: MakeTensor) -> dict[str, torch.Tensor]:  # `make`: a tensor's values by its name
            self._load_generated(module, make, self.dtype)
            return find_port_tensors(module)

        sources, shapes = sample.sources(self.spec), expected_layer_shapes(self.spec)
        origins = OriginTracer(sources, shapes, load, pool=self.pool).trace()
        return self.runtime.messages.gather(origins)

    def build_trial(self, dtype: torch.dtype) -> bool:
        """Build the port in `dtype`, for `run_trial`; decide whether it computes in BF16."""
        self._share(partial(TracedPort.build_trial, dtype=dtype))
        module = self._build(self.spec, dtype)
        self._trial = module, dtype
        return any(parameter.dtype.itemsize == 2 for parameter in module.parameters())

    def run_trial(
        self, tensors: Tensors, hidden_states: torch.Tensor, inputs: Inputs, refills: Mapping[str, str]
    ) -> torch.Tensor:
        """Load generated weights, and return the port's output [B,S,H] for hidden states [B,S,H].

        `refills` names port tensors to overwrite once the port is loaded, each with the weight to write there.
        """
        assert self._trial is not None, "a port is built before it runs"
        if self.runtime.ranks.are_several:
            # Functions that make tensors on access cannot be sent: the tensors are made now.
            tensors, refills = dict(tensors), dict(refills)
        self._share(
            partial(
                TracedPort.run_trial,
                tensors=tensors,
                hidden_states=hidden_states,
                inputs=inputs,
                refills=refills,
            )
        )
        module, dtype = self._trial
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
                hidden_states.to(dtype, copy=True), inputs.attention_mask.clone(), inputs.position_ids.clone()
            )
        return find_output(result, tuple(hidden_states.shape), what=port)

    def measure_conversion(self) -> int | None:
        """Return the most bytes of float32 temporaries that the conversion holds at once; None for a large layer."""
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

    def load_checkpoint(self, config: Mapping[str, Any]) -> list[HeldPart]:
        """Load the checkpoint's own layer, of a model of `config`, into `loaded`; return what each rank holds."""
        self._share(partial(TracedPort.load_checkpoint, config=config))
        spec = ModelSpec.from_config(config)
        module = self._build(spec, self.dtype)
        tensors = NotedTensors.noting(self.reader, spec, self.layer, self.dtype, table=LineTable(spec))
        self._load(module, tensors, spec)
        self.loaded = find_port_tensors(module)
        return self.runtime.messages.gather(check_part(module, tensors, sent=PortLines(spec), pool=self.pool))

    def _share(self, call: Callable[[TracedPort], object]) -> None:
        """Let the other ranks make the lead's call; a call that ends in `gather` does so on all ranks."""
        if self.runtime.ranks.is_lead:
            self.runtime.messages.send(call)

    def _build(self, spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
        return self.target.build(spec, self.layer, dtype=dtype, ranks=self.runtime.ranks)

    def _load_generated(self, module: nn.Module, make: MakeTensor, dtype: torch.dtype) -> None:
        tensors = GeneratedTensors(self.spec, layer=self.layer, dtype=dtype, make=make, reader=self.reader)
        self._load(module, tensors, self.spec)

    def _load(self, module: nn.Module, tensors: LayerTensors, spec: ModelSpec) -> None:
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=self.pool)
        self.target.load(module, tensors, spec, loader=loader, ranks=self.runtime.ranks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceAssignment:
    """Values that another rank needs to build its `TracedPort`."""

    folder: Path
    target: str  # the port, as the user named it
    layer: int
    dtype: torch.dtype
    config: Mapping[str, Any]  # config.json of the traced model


def follow_trace(assignment: TraceAssignment, runtime: Runtime) -> None:
    """Make the lead's calls on another rank, until no more comes; an error here ends the inspection on all."""
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
            runtime=runtime,
            pool=pool,
        )
        call: Callable[[TracedPort], object] | None
        while (call := runtime.messages.receive()) is not None:
            call(port)
