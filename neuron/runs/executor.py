"""LayerExecutor: runs single layers of a target on a device, weights loaded just before, sites recorded.

On several ranks each has one. That of the lead is told what to run, and tells the others, which `follow`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import nn

from minimax_tools.capture.manifest import dtype_name
from minimax_tools.capture.recorder import Recorder, copy_on_device
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.read_ahead import ReadAhead
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import Mm2Error, TargetError
from minimax_tools.machine.memory import MemoryBudget, give_back_freed_memory
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from neuron.devices.runtime import Runtime
from neuron.devices.weights import Weight, WeightLoader
from neuron.ports.exposure import Exposure, find_exposure
from neuron.ports.port_errors import port_errors
from neuron.ports.returned import PAST, find_key_values, find_output, require_past
from neuron.ports.target import Target
from neuron.process.status import doing
from neuron.runs.footprint import RunLimits, choose_read_ahead, device_footprint
from neuron.runs.layer_input import LayerInput
from neuron.runs.layer_run import LayerRun
from neuron.runs.layer_times import Stopwatch
from neuron.runs.orders import Assignment, LayerOrder, ReleaseOrder
from neuron.runs.rank_assembly import RankAssembly

logger = logging.getLogger(__name__)

_ARGUMENTS = ("hidden_states", "attention_mask", "position_ids")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """Weights that are being made for a layer that has not begun."""

    tensors: LayerTensors
    weights: dict[str, Weight]


class LayerExecutor:
    """Builds, loads and runs a target's layers one after the other; one at a time is in memory.

    A context manager: its threads end with the block.

    Args:
        target: The implementation.
        runtime: The device.
        reader: The checkpoint.
        spec: Its quantities.
        dtype: Dtype of weights and activations.
        inputs: The token rows; their number tells what a layer takes.
        budget: What anonymous memory may be taken.
        prefetch: Whether the next layer is fetched from the disk while one is loaded and runs; None for where memory
            holds it.
    """

    def __init__(
        self,
        *,
        target: Target,
        runtime: Runtime,
        reader: CheckpointReader,
        spec: ModelSpec,
        dtype: torch.dtype,
        inputs: Inputs,
        budget: MemoryBudget,
        prefetch: bool | None,
    ) -> None:
        self._target = target
        self._runtime = runtime
        self._reader = reader
        self._spec = spec
        self._dtype = dtype
        footprint = device_footprint(target, spec, dtype=dtype, inputs=inputs, runtime=runtime)
        self.limits = RunLimits(footprint=footprint, budget=budget)
        self._pool = ReadingPool(torch.get_num_threads())
        self.loader = WeightLoader(runtime.device, wait=runtime.synchronise, pool=self._pool)
        self._ahead = (
            ReadAhead(reader.index) if choose_read_ahead(prefetch, footprint, reader.index) else None
        )
        self._resident: nn.Module | None = None
        # The layer whose weights the resident module holds.
        self._resident_layer: int | None = None
        self._prepared: _Prepared | None = None

    def __enter__(self) -> LayerExecutor:
        self._tell(
            Assignment(
                folder=self._reader.folder,
                target=self._target.name,
                dtype=self._dtype,
                inputs=self.limits.footprint.inputs,
                budget_bytes=self.limits.budget.limit_bytes,
            )
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the others may be in the middle of a layer, and hear nothing.
        if kind is None:
            self._tell(None)
        self._free()
        self._pool.close()
        if self._ahead is not None:
            self._ahead.close()

    def run(
        self,
        layer: int,
        given: LayerInput,
        *,
        sites: tuple[Site, ...],
        feeds: Mapping[Site, torch.Tensor] | None = None,
        keeps_past: bool = False,
        then: int | None = None,
    ) -> LayerRun:
        """Run one layer; its weights are loaded where those of another are there.

        Args:
            layer: Its number.
            given: What it is fed; it is not changed.
            sites: What to record.
            feeds: Tensors to feed at some sites instead of what the port computes there.
            keeps_past: Whether the keys and values of these rows are wanted.
            then: The layer that will run next, to be read ahead.

        Raises:
            MemoryBudgetError: The layer, or what it computes, would break the budget.
            CheckpointError: The layer's tensors cannot be read.
            TargetError: The port could not be built, loaded or run, takes or gives no past, or cannot be fed at a
                site.
        """
        order = LayerOrder(
            layer=layer, given=given, sites=sites, feeds=dict(feeds or {}), keeps_past=keeps_past, then=then
        )
        self._tell(order)
        done = self._perform(order)
        assert done is not None, "the lead has what all ranks gave"
        return done

    def follow(self) -> None:
        """Carry out what the lead's executor is told to run, until that one ends.

        Raises:
            Mm2Error: As for `run`.
        """
        while (order := self._runtime.crew.hear()) is not None:
            if isinstance(order, LayerOrder):
                self._perform(order)
            else:
                self._free()

    def release(self) -> None:
        """Free the layer that ran last, on the device and on the host."""
        self._tell(ReleaseOrder())
        self._free()

    def _tell(self, message: object) -> None:
        """Say something to the ranks that follow this one."""
        if self._runtime.ranks.is_lead:
            self._runtime.crew.tell(message)

    def _perform(self, order: LayerOrder) -> LayerRun | None:
        """Carry out an order within the time limit of a layer."""
        activity = f"at work on layer {order.layer} of target {self._target.name}"
        with doing(activity, is_in_port=False):
            return self._carry_out(order)

    def _carry_out(self, order: LayerOrder) -> LayerRun | None:
        """Run this rank's part of a layer: on the lead what all parts make up, on others nothing."""
        given, sites = order.given, order.sites
        what = f"target {self._target.name}, layer {order.layer}"
        watch = Stopwatch(self._runtime, self._reader, self.loader)
        module = self._loaded(order.layer, then=order.then)
        self.limits.allow_activations(order.layer)
        watch.loaded()
        batch_shape = (given.batch_size, given.num_rows)
        exposure = find_exposure(module, what=what)
        if order.keeps_past:
            require_past(module, what=what)
            if self._runtime.ranks.are_several:
                exposure.require_heads(Site.K_ROPE, what=f"{what}, keys of the past")
        assembly = RankAssembly(
            crew=self._runtime.crew, exposure=exposure, spec=self._spec, batch_shape=batch_shape, what=what
        )
        _refuse_unfeedable(order.feeds, exposure, what=what)
        feeds = {site: assembly.cut(site, tensor) for site, tensor in order.feeds.items()}
        taps = {site: tap for site, tap in exposure.taps.items() if site in sites or site in feeds}
        recorder = Recorder(module, taps, keep=copy_on_device, feeds=feeds)
        with torch.no_grad(), recorder:
            result = self._forward(module, assembly.own(given), layer=order.layer, what=what)
        shown = find_output(result, tuple(given.hidden_states.shape), what=what)
        key_values = find_key_values(result, batch_shape, what=what) if order.keeps_past else None
        self._prepare(order.then)
        self._runtime.synchronise()
        watch.ran()
        _refuse_unfed(feeds, recorder, what=what)
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

    def _free(self) -> None:
        self._resident = self._resident_layer = None
        self._take_prepared(None)
        self.loader.release()
        # Many small weights stay with the allocator, which could not use them for a large one.
        give_back_freed_memory()

    def _loaded(self, layer: int, *, then: int | None) -> nn.Module:
        """The module with the layer's weights; the old one is gone before a new one is built."""
        if self._resident is not None and self._resident_layer == layer:
            return self._resident
        prepared = self._take_prepared(layer)
        tensors = self._open_tensors(layer) if prepared is None else prepared.tensors
        self._read_ahead(layer, then)
        module, self._resident, self._resident_layer = self._resident, None, None
        is_built_anew = module is None or not self._target.is_reused
        if module is None or is_built_anew:
            del module
            self.limits.allow_layer(layer)
            module = self._target.build(self._spec, layer, dtype=self._dtype, ranks=self._runtime.ranks)
        if self._target.converts(module):
            self.limits.allow_conversion(layer, is_built_anew=is_built_anew)
        self._target.load(
            module,
            tensors,
            self._spec,
            loader=self.loader,
            ranks=self._runtime.ranks,
            prepared=None if prepared is None else prepared.weights,
        )
        if self._runtime.spmd is not None:
            self._runtime.spmd.shard(module, what=f"target {self._target.name}")
        self._resident, self._resident_layer = module, layer
        return module

    def _prepare(self, layer: int | None) -> None:
        """Begin to read the next layer's weights while this one runs, where the host can hold them beside it.

        Not through a port's own conversion: the module that it may write to is still to run, in further passes too.
        """
        module = self._resident
        is_wanted = self._ahead is not None and self._target.is_reused and self._target.reads_weights
        if layer is None or module is None or not is_wanted or self._prepared is not None:
            return
        if self._target.converts(module):
            return
        if self._runtime.device.type == "cpu" or not self.limits.has_room_for_another_layer():
            return
        logger.debug("Preparing layer %d", layer)
        try:
            tensors = self._open_tensors(layer)
            weights = self._target.prepare(
                module, tensors, self._spec, loader=self.loader, ranks=self._runtime.ranks
            )
        except Mm2Error:
            # Loading meets it again: what has run is to be stored first.
            return
        self._prepared = _Prepared(tensors=tensors, weights=weights)

    def _take_prepared(self, layer: int | None) -> _Prepared | None:
        """What was prepared for a layer; what was for another is dropped."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.tensors.layer == layer:
            return prepared
        self.loader.abandon(prepared.weights)
        return None

    def _open_tensors(self, layer: int) -> LayerTensors:
        return LayerTensors.open(self._reader, self._spec, layer, self._dtype)

    def _read_ahead(self, layer: int, then: int | None) -> None:
        if self._ahead is None or not self._target.reads_weights:
            return
        # The layer itself comes first: two that are read at once would each take twice as long.
        self._ahead.request(layer)
        if then is not None:
            self._ahead.request(then)

    def _forward(self, module: nn.Module, given: LayerInput, *, layer: int, what: str) -> object:
        """What the port returns."""
        device = self._runtime.device
        # Copies: a port may work in place. From the host for every layer: no graph may depend on the layer.
        states = given.hidden_states.to(self._dtype).to(device, copy=True)
        attention_mask = given.attention_mask.to(device, copy=True)
        position_ids = given.position_ids.to(device, copy=True)
        past = {} if given.past is None else {PAST: tuple(part.to(device, copy=True) for part in given.past)}
        called = f"It is called as module({', '.join((*_ARGUMENTS, *past))}); see --debug for the traceback."
        activity = (
            f"running layer {layer} of target {self._target.name} on hidden states {list(states.shape)}"
        )
        with port_errors(f"{what} failed while it ran", activity=activity, next_step=called):
            return module(states, attention_mask, position_ids, **past)

    def _accepted(
        self, recorder: Recorder, assembly: RankAssembly, sites: tuple[Site, ...]
    ) -> dict[Site, torch.Tensor]:
        """The recorded tensors that may stand for their sites, of all ranks, on the CPU, in execution order."""
        accepted = {}
        for site in sites:
            piece = recorder.tensors.get(site)
            tensor = assembly.join(site, None if piece is None else piece.to("cpu"))
            if tensor is not None and assembly.exposure.accepts(
                site, tensor, self._spec, assembly.batch_shape
            ):
                accepted[site] = tensor
        return accepted


def _refuse_unfeedable(feeds: Mapping[Site, torch.Tensor], exposure: Exposure, *, what: str) -> None:
    missing = [str(site) for site in feeds if site not in exposure.taps]
    if missing:
        raise TargetError(
            f"{what} cannot be fed at {', '.join(missing)}: it does not expose them",
            next_step="Name them in the port's `sites`, or run the whole layer: mm2-test single-layer.",
        )


def _refuse_unfed(feeds: Mapping[Site, torch.Tensor], recorder: Recorder, *, what: str) -> None:
    """A submodule that the port does not call, or calls for something else, takes no feed."""
    missed = [str(site) for site in feeds if site not in recorder.tensors]
    if missed:
        raise TargetError(
            f"{what} was not fed at {', '.join(missed)}: no tensor passed there while it ran",
            next_step="Point the port's `sites` at submodules that it calls, or run the whole layer: "
            "mm2-test single-layer.",
        )


def _router_dtypes(module: nn.Module) -> dict[str, str]:
    """Dtypes of what looks like the router's gate and correction bias, by their usual names."""
    found: dict[str, str] = {}
    for name, tensor in module.state_dict().items():
        if name.endswith("correction_bias"):
            found["correction_bias"] = dtype_name(tensor.dtype)
        elif name.endswith(("gate.weight", "router.weight", "linear_router.weight")):
            found["router_gate"] = dtype_name(tensor.dtype)
    return found
