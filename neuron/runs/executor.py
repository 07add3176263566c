"""LayerExecutor: runs single layers of a port on a device, and records their sites.

Each of several ranks has an executor. The lead's sends its requests to the others, which `follow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from compare.diagnosis.proof.undo import Undo
from minimax_tools.capture.further import require_further, verify_further
from minimax_tools.capture.manifest import HeldWeights
from minimax_tools.capture.recorder import Calls, join_calls
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from neuron.devices.device_memory import device_memory_errors
from neuron.devices.runtime import Runtime, calls_to_host
from neuron.ports.exposure import Exposure, find_exposure, router_dtypes
from neuron.ports.port_errors import port_errors
from neuron.ports.recorded_layer import RecordedLayer
from neuron.ports.returned import PAST, find_key_values, find_output, require_past
from neuron.process.status import doing
from neuron.runs.device_request import PortSetup
from neuron.runs.footprint import device_footprint
from neuron.runs.layer_run import LayerInput, LayerRequest, LayerRun
from neuron.runs.rank_assembly import RankAssembly
from neuron.runs.resident_layer import ResidentLayer
from neuron.runs.stopwatch import LayerStopwatch
from neuron.weight_trace.held_check import HeldPart, conclude
from neuron.weight_trace.source_lines import LineTable

# Names of the arguments that every port gets, in their order.
_ARGUMENTS = ("hidden_states", "attention_mask", "position_ids")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """The setup of a port, as the lead sends it to the other ranks before any request."""

    folder: Path  # the checkpoint
    target: str  # the port as the user named it
    dtype: torch.dtype
    inputs: Inputs
    budget_bytes: int | None  # limit of each rank's anonymous memory; None for no limit
    undone: tuple[Undo, ...] = ()  # mistakes to undo in the tensors of every layer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequest:
    """A request from the lead to free the layer that ran last."""


class LayerExecutor:
    """A runner of a port's layers; one at a time is in memory. A context manager, whose threads end with the block."""

    def __init__(self, setup: PortSetup, *, runtime: Runtime, reader: CheckpointReader) -> None:
        self.setup = setup
        self.runtime = runtime
        self.reader = reader
        self.footprint = device_footprint(setup, runtime)  # host memory of a layer, from shapes
        self._resident = ResidentLayer(setup, runtime=runtime, reader=reader, footprint=self.footprint)
        self.loader = self._resident.loader
        self._lines = LineTable(setup.spec)

    def __enter__(self) -> LayerExecutor:
        self._send(
            Assignment(
                folder=self.reader.folder,
                target=self.setup.target.name,
                dtype=self.setup.dtype,
                inputs=self.setup.inputs,
                budget_bytes=self.setup.budget.limit_bytes,
                undone=self.setup.undone,
            )
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After an error the others may be in the middle of a layer, and receive nothing.
        if kind is None:
            self._send(None)
        self._resident.close()

    def run(self, request: LayerRequest) -> LayerRun:
        """Run one layer on all ranks, in its calls; its weights are loaded unless it is the layer that ran last.

        Raises:
            MemoryBudgetError: The layer, or what it computes, would exceed the budget.
            CheckpointError: The layer's tensors cannot be read.
            TargetError: The port could not be built, loaded or run, takes or gives no past (keys and values of earlier
                tokens), or does not expose a site of the border.
        """
        runs = [self._run_laid_out(call) for call in request.by_call()]
        return LayerRun.join(runs, request.calls) if len(runs) > 1 else runs[0]

    def _run_laid_out(self, request: LayerRequest) -> LayerRun:
        """Run a call, its rows padded as the port takes them, and give its values back as the rows were padded."""
        layer_input = request.layer_input
        num_padded = layer_input.num_padded_left
        if layer_input.past is not None or not self.setup.target.pads_right or not bool(num_padded.any()):
            return self._run_call(request)
        return self._run_call(request.shifted(num_padded)).shifted(-num_padded)

    def _run_call(self, request: LayerRequest) -> LayerRun:
        self._send(request)
        run = self._run_part(request)
        assert run is not None, "the lead assembles the parts of all ranks"
        return run

    def follow(self) -> None:
        """Run this rank's part of every layer that the lead runs, until the lead's block ends. Raise as `run` does."""
        while (request := self.runtime.messages.receive()) is not None:
            if isinstance(request, LayerRequest):
                self._run_part(request)
            else:
                # A `ReleaseRequest`.
                self._resident.free()

    def release(self) -> None:
        """Free the layer that ran last, on the device and on the host, on all ranks."""
        self._send(ReleaseRequest())
        self._resident.free()

    def _send(self, message: object) -> None:
        if self.runtime.ranks.is_lead:
            self.runtime.messages.send(message)

    def _run_part(self, request: LayerRequest) -> LayerRun | None:
        """Run this rank's part of a layer, within the time limit of a layer; None on ranks other than the lead."""
        activity = f"at work on layer {request.layer} of port {self.setup.target.name}"
        with doing(activity, is_in_port=False):
            return self._load_and_run(request)

    def _load_and_run(self, request: LayerRequest) -> LayerRun | None:
        layer_input, sites = request.layer_input, request.sites
        what = f"port {self.setup.target.name}, layer {request.layer}"
        stopwatch = LayerStopwatch(self.runtime, self.reader, self.loader)
        with device_memory_errors(f"when the weights of layer {request.layer} were written to it"):
            module = self._resident.load(request.layer, next_layer=request.next_layer)
        self.setup.budget.require(self.footprint.activation_bytes, f"what layer {request.layer} computes")
        held_weights = self._join_held(self._resident.take_held())
        stopwatch.mark_loaded()
        exposure = self._find_exposure(module, request, what=what)
        batch_shape = (layer_input.batch_size, layer_input.num_columns)  # [B,S]
        assembly = RankAssembly(
            runtime=self.runtime,
            exposure=exposure,
            batch_shape=batch_shape,
            head_dim=self.setup.spec.head_dim,
            what=what,
        )
        # Golden values at the border of the component to run: they replace what the port computes there.
        border = {site: assembly.cut(site, tensor) for site, tensor in request.border.items()}
        taps = {site: tap for site, tap in exposure.taps.items() if site in sites or site in border}
        verify_further(module, request.further, what=what)
        recorded = RecordedLayer(module, taps, request.further)
        with torch.no_grad(), recorded.recorder, recorded.further:
            result, shown, further = self._forward(
                recorded, assembly.cut_past(layer_input), border, layer=request.layer, what=what
            )
        rank_output = find_output(result, tuple(layer_input.hidden_states.shape), what=what)
        rank_key_values = find_key_values(result, batch_shape, what=what) if request.keeps_past else None
        # The device still computes: the host reads meanwhile.
        self._resident.prepare_next(request.next_layer)
        self.runtime.synchronise()
        stopwatch.mark_computed()
        _require_reached(border, shown, what=what)
        # `None` stands for what the port returned: all come in one transfer.
        wanted = {site: shown[site] for site in sites if site in shown}
        calls = calls_to_host({None: Calls((rank_output,)), **wanted})
        (rank_output,) = calls.pop(None).tensors
        # All ranks join, in this order.
        tensors = self._join_sites(join_calls(calls, batch_shape), assembly, sites)
        output = assembly.join(Site.OUTPUT, rank_output)
        key_values = None if rank_key_values is None else assembly.join_past(rank_key_values)
        joined_further = assembly.join_further(request.further, further)
        if output is None:
            # Only the lead gets the joined tensors.
            return None
        require_further(request.further, joined_further, what=what)
        return LayerRun(
            output=output,
            tensors=tensors,
            not_exposed=tuple(site for site in sites if site not in tensors),
            num_calls={
                site: len(of_site.tensors)
                for site, of_site in calls.items()
                if site not in tensors and len(of_site.tensors) > 1
            },
            router_dtypes=router_dtypes(module),
            key_values=key_values,
            further=joined_further,
            held_weights=held_weights,
            times=stopwatch.times(),
        )

    def _join_held(self, part: HeldPart | None) -> HeldWeights | None:
        """Return what all ranks hold of a layer; None on other ranks than the lead, and if nothing was compared."""
        if part is None:
            return None
        parts = self.runtime.messages.gather(part)
        return conclude(parts, self._lines) if parts else None

    def _find_exposure(self, module: nn.Module, request: LayerRequest, *, what: str) -> Exposure:
        """Find the sites that the port exposes; raise TargetError if it cannot serve the request."""
        exposure = find_exposure(module, what=what)
        if request.keeps_past:
            require_past(module, what=what)
            if self.runtime.ranks.are_several:
                exposure.require_heads(Site.K_ROPE, what=f"{what}, keys of the past")
        _require_exposed(request.border, exposure, what=what)
        return exposure

    def _forward(
        self,
        recorded: RecordedLayer,
        layer_input: LayerInput,
        border: Mapping[Site, torch.Tensor],
        *,
        layer: int,
        what: str,
    ) -> tuple[object, Mapping[Site, Calls], Mapping[str, torch.Tensor]]:
        """Call the port, compiled if the run compiles; return what it returns, its sites, and its further outputs."""
        device, past = self.runtime.device, layer_input.past
        # Copied, because a port may work in place. Copied from the host, so that no graph depends on the layer before.
        states = layer_input.hidden_states.to(self.setup.dtype).to(device, copy=True)
        attention_mask = layer_input.attention_mask.to(device, copy=True)
        position_ids = layer_input.position_ids.to(device, copy=True)
        keywords = {} if past is None else {PAST: tuple(tensor.to(device, copy=True) for tensor in past)}
        arguments = ", ".join((*_ARGUMENTS, *keywords))
        next_step = f"It is called as module({arguments}); see --debug for the traceback."
        name, shape = self.setup.target.name, list(states.shape)
        activity = f"running layer {layer} of port {name} on hidden states {shape}"
        with port_errors(f"{what} failed while it ran", activity=activity, next_step=next_step):
            compiler = self.runtime.compiler
            run = compiler.compile(recorded, what=what) if compiler else recorded
            result, tensors, further = run(
                {site: tensor.to(device) for site, tensor in border.items()},
                states,
                attention_mask,
                position_ids,
                **keywords,
            )
            return result, tensors, further

    def _join_sites(
        self, pieces: Mapping[Site, torch.Tensor], assembly: RankAssembly, sites: tuple[Site, ...]
    ) -> dict[Site, torch.Tensor]:
        """Join recorded tensors, on the CPU, over all ranks; return those that fit their sites, in execution order."""
        tensors, spec = {}, self.setup.spec
        for site in sites:
            tensor = assembly.join(site, pieces.get(site))
            if tensor is not None and assembly.exposure.accepts(site, tensor, spec, assembly.batch_shape):
                tensors[site] = tensor
        return tensors


def _require_exposed(border: Mapping[Site, torch.Tensor], exposure: Exposure, *, what: str) -> None:
    missing = [str(site) for site in border if site not in exposure.taps]
    if missing:
        raise TargetError(
            f"{what} cannot take the golden's values at {', '.join(missing)}: it does not expose them",
            next_step="Name them in the port's `sites`, or run the whole layer: mm2-test single-layer.",
        )


def _require_reached(border: Mapping[Site, torch.Tensor], shown: Mapping[Site, Calls], *, what: str) -> None:
    """Refuse a run in which a golden value was not used: no tensor passed at its site, so none was replaced."""
    unused = [str(site) for site in border if site not in shown]
    if unused:
        raise TargetError(
            f"{what} took no golden value at {', '.join(unused)}: no tensor passed there while it ran",
            next_step="Point the port's `sites` at submodules that it calls, or run the whole layer: "
            "mm2-test single-layer.",
        )
