"""LayerExecutor: runs single layers of a port on a device, and records their sites.

Each of several ranks has an executor. The lead's sends its requests to the others, which `follow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from minimax_tools.capture.digests import dtype_name
from minimax_tools.capture.recorder import Recorder, copy_on_device
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader
from neuron.ports.exposure import Exposure, find_exposure
from neuron.ports.port_errors import port_errors
from neuron.ports.returned import PAST, find_key_values, find_output, require_past
from neuron.process.status import doing
from neuron.runs.device_request import PortSetup
from neuron.runs.footprint import RunLimits, device_footprint
from neuron.runs.layer_run import LayerInput, LayerRequest, LayerRun
from neuron.runs.layer_times import Stopwatch
from neuron.runs.rank_assembly import RankAssembly
from neuron.runs.resident_layer import ResidentLayer

_ARGUMENTS = ("hidden_states", "attention_mask", "position_ids")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assignment:
    """The setup of a port, as the lead sends it to the other ranks before any request.

    Args:
        folder: The checkpoint.
        target: The port, as the user named it.
        budget_bytes: Limit of each rank's anonymous memory; None for no limit.
    """

    folder: Path
    target: str
    dtype: torch.dtype
    inputs: Inputs
    budget_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequest:
    """A request to free the layer that ran last."""


class LayerExecutor:
    """Runs a port's layers; one at a time is in memory. A context manager, whose threads end with the block."""

    def __init__(self, setup: PortSetup, *, runtime: Runtime, reader: CheckpointReader) -> None:
        self.setup = setup
        self.runtime = runtime
        self.reader = reader
        self.limits = RunLimits(footprint=device_footprint(setup, runtime), budget=setup.budget)
        self._resident = ResidentLayer(setup, runtime=runtime, reader=reader, limits=self.limits)

    @property
    def loader(self) -> WeightLoader:
        """The loader that brings weights onto the device."""
        return self._resident.loader

    def __enter__(self) -> LayerExecutor:
        self._send(
            Assignment(
                folder=self.reader.folder,
                target=self.setup.target.name,
                dtype=self.setup.dtype,
                inputs=self.setup.inputs,
                budget_bytes=self.setup.budget.limit_bytes,
            )
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After an error the others may be in the middle of a layer, and receive nothing.
        if kind is None:
            self._send(None)
        self._resident.close()

    def run(self, request: LayerRequest) -> LayerRun:
        """Run one layer on all ranks; its weights are loaded unless they are there.

        Raises:
            MemoryBudgetError: The layer, or what it computes, would exceed the budget.
            CheckpointError: The layer's tensors cannot be read.
            TargetError: The port could not be built, loaded or run, takes or gives no past, or does not expose a
                site of the border.
        """
        self._send(request)
        run = self._run_part(request)
        assert run is not None, "the lead assembles the parts of all ranks"
        return run

    def follow(self) -> None:
        """Run this rank's part of every layer that the lead's executor runs, until that one ends.

        Raises:
            Mm2Error: As for `run`.
        """
        while (request := self.runtime.messages.receive()) is not None:
            if isinstance(request, LayerRequest):
                self._run_part(request)
            else:
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
        activity = f"at work on layer {request.layer} of target {self.setup.target.name}"
        with doing(activity, is_in_port=False):
            return self._load_and_run(request)

    def _load_and_run(self, request: LayerRequest) -> LayerRun | None:
        layer_input, sites = request.layer_input, request.sites
        what = f"target {self.setup.target.name}, layer {request.layer}"
        watch = Stopwatch(self.runtime, self.reader, self.loader)
        module = self._resident.load(request.layer, next_layer=request.next_layer)
        self.limits.allow_activations(request.layer)
        watch.loaded()
        exposure = find_exposure(module, what=what)
        if request.keeps_past:
            require_past(module, what=what)
            if self.runtime.ranks.are_several:
                exposure.require_heads(Site.K_ROPE, what=f"{what}, keys of the past")
        batch_shape = (layer_input.batch_size, layer_input.num_rows)
        assembly = RankAssembly(
            runtime=self.runtime,
            exposure=exposure,
            spec=self.setup.spec,
            batch_shape=batch_shape,
            what=what,
        )
        _require_exposed(request.border, exposure, what=what)
        border = {site: assembly.cut(site, tensor) for site, tensor in request.border.items()}
        taps = {site: tap for site, tap in exposure.taps.items() if site in sites or site in border}
        recorder = Recorder(module, taps, keep=copy_on_device, feeds=border)
        with torch.no_grad(), recorder:
            result = self._forward(module, assembly.cut_past(layer_input), layer=request.layer, what=what)
        shown = find_output(result, tuple(layer_input.hidden_states.shape), what=what)
        key_values = find_key_values(result, batch_shape, what=what) if request.keeps_past else None
        self._resident.prepare(request.next_layer)
        self.runtime.synchronise()
        watch.ran()
        _require_reached(border, recorder, what=what)
        tensors = self._accepted(recorder, assembly, sites)
        output = assembly.join(Site.OUTPUT, shown.to("cpu"))
        past = None if key_values is None else assembly.join_past(key_values)
        if output is None:
            return None
        return LayerRun(
            output=output,
            tensors=tensors,
            not_exposed=tuple(site for site in sites if site not in tensors),
            router_dtypes=_router_dtypes(module),
            key_values=past,
            times=watch.times(),
        )

    def _forward(self, module: nn.Module, layer_input: LayerInput, *, layer: int, what: str) -> object:
        """Call the port, and return what it returns."""
        device, past = self.runtime.device, layer_input.past
        # Copies: a port may work in place. From the host for every layer: no graph may depend on the layer.
        states = layer_input.hidden_states.to(self.setup.dtype).to(device, copy=True)
        attention_mask = layer_input.attention_mask.to(device, copy=True)
        position_ids = layer_input.position_ids.to(device, copy=True)
        keywords = {} if past is None else {PAST: tuple(part.to(device, copy=True) for part in past)}
        called = (
            f"It is called as module({', '.join((*_ARGUMENTS, *keywords))}); see --debug for the traceback."
        )
        name, shape = self.setup.target.name, list(states.shape)
        activity = f"running layer {layer} of target {name} on hidden states {shape}"
        with port_errors(f"{what} failed while it ran", activity=activity, next_step=called):
            return module(states, attention_mask, position_ids, **keywords)

    def _accepted(
        self, recorder: Recorder, assembly: RankAssembly, sites: tuple[Site, ...]
    ) -> dict[Site, torch.Tensor]:
        """Return the recorded tensors that fit their sites, of all ranks, on the CPU, in execution order."""
        accepted = {}
        for site in sites:
            piece = recorder.tensors.get(site)
            tensor = assembly.join(site, None if piece is None else piece.to("cpu"))
            if tensor is not None and assembly.accepts(site, tensor):
                accepted[site] = tensor
        return accepted


def _require_exposed(border: Mapping[Site, torch.Tensor], exposure: Exposure, *, what: str) -> None:
    missing = [str(site) for site in border if site not in exposure.taps]
    if missing:
        raise TargetError(
            f"{what} cannot take the golden's values at {', '.join(missing)}: it does not expose them",
            next_step="Name them in the port's `sites`, or run the whole layer: mm2-test single-layer.",
        )


def _require_reached(border: Mapping[Site, torch.Tensor], recorder: Recorder, *, what: str) -> None:
    """Refuse a submodule that the port does not call, or calls for something else: no golden value reached it."""
    missed = [str(site) for site in border if site not in recorder.tensors]
    if missed:
        raise TargetError(
            f"{what} took no golden value at {', '.join(missed)}: no tensor passed there while it ran",
            next_step="Point the port's `sites` at submodules that it calls, or run the whole layer: "
            "mm2-test single-layer.",
        )


def _router_dtypes(module: nn.Module) -> dict[str, str]:
    """Return the dtypes of the router's gate and correction bias, found by their usual names."""
    found: dict[str, str] = {}
    for name, tensor in module.state_dict().items():
        if name.endswith("correction_bias"):
            found["correction_bias"] = dtype_name(tensor.dtype)
        elif name.endswith(("gate.weight", "router.weight", "linear_router.weight")):
            found["router_gate"] = dtype_name(tensor.dtype)
    return found
