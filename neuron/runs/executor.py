"""LayerExecutor: runs single layers of a port on a device, and records their sites and times.

Each of several ranks has an executor. The lead's sends its calls to the others, which `follow`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from minimax_tools.capture.further import (
    FurtherPlace,
    FurtherRecorder,
    names_place,
    require_further,
    verify_further,
)
from minimax_tools.capture.manifest import HeldWeights
from minimax_tools.capture.recorder import Calls, Recorder, copy_on_device, join_calls
from minimax_tools.capture.taps import Tap
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from neuron.builtin.layer import KeyValues
from neuron.devices.machine import device_memory_errors
from neuron.devices.runtime import Runtime, calls_to_host
from neuron.devices.weights import WeightLoader
from neuron.ports.exposure import Exposure, find_exposure, router_dtypes
from neuron.ports.returned import PAST, find_key_values, find_output, require_past
from neuron.ports.target import Target, port_errors
from neuron.process.status import doing
from neuron.runs.layer_run import LayerInput, LayerRequest, LayerRun, LayerTimes
from neuron.runs.port_setup import PortSetup, RankExecutor, TensorEdit
from neuron.runs.resident_layer import ResidentLayer, device_footprint
from neuron.weight_trace.held_check import HeldPart, conclude


class RecordedLayer(nn.Module):
    """A port's layer, called with values that replace its own at some sites, and then as the layer itself.

    Its hooks are in place in `with layer.recorder, layer.further:`. torch.compile takes them into the graph: a
    site becomes an output of it, and a value that replaces one an input.
    """

    def __init__(
        self, layer: nn.Module, taps: Mapping[Site, Tap], further: tuple[FurtherPlace, ...] = ()
    ) -> None:
        super().__init__()
        self.layer = layer
        self.recorder: Recorder[Site] = Recorder(layer, taps, keep=copy_on_device)
        self.further = FurtherRecorder(layer, further, keep=copy_on_device)
        # The graph of another layer is taken only if this is equal: torch.compile does not look at hooks.
        self.places = tuple((site, str(tap)) for site, tap in taps.items())
        self.further_places = tuple(map(str, further))

    def forward(
        self, feeds: Mapping[Site, torch.Tensor], *arguments: object, **keywords: object
    ) -> tuple[Any, dict[Site, Calls], dict[str, torch.Tensor]]:
        """Return what the layer returns, copies of the tensors at each site that it reached, and further outputs."""
        self.recorder.start(feeds)
        self.further.start()
        result = self.layer(*arguments, **keywords)
        calls = self.recorder.calls()
        sites = {site: calls[site] for site, _ in self.places if site in calls}
        return result, sites, dict(self.further.tensors)


class LayerStopwatch:
    """A stopwatch that starts when it is made; `mark_loaded` and `mark_computed` come in this order, then `times`.

    The runtime counts the seconds of compiling, the loader those of sending weights to the device, and the reader those
    of converting, reading included, summed over its threads. What is read while a layer computes counts nowhere.
    """

    def __init__(self, runtime: Runtime, reader: CheckpointReader, loader: WeightLoader) -> None:
        self._runtime, self._reader, self._loader = runtime, reader, loader
        self._started = self._read_counters()

    def mark_loaded(self) -> None:
        """Note that the weights are loaded."""
        self._loaded = self._read_counters()

    def mark_computed(self) -> None:
        """Note that the forward pass has been computed: the device is synchronised."""
        self._computed = self._read_counters()

    def times(self) -> LayerTimes:
        """Divide the time until now among the phases; called when the results are on the host."""
        loading = self._loaded.since(self._started)
        computing = self._computed.since(self._loaded)
        host_s = max(0.0, loading.clock_s - loading.sending_s - loading.compile_s)
        # Parallel threads convert for more seconds than pass: then reading gets its share of `host_s`, else its own
        # seconds. The tiny number avoids 0 ∕ 0.
        read_s = host_s * loading.reading_s / max(loading.converting_s, host_s, 1e-9)
        return LayerTimes(
            read_s=read_s,
            regroup_s=host_s - read_s,
            transfer_s=loading.sending_s,
            compile_s=loading.compile_s + computing.compile_s,
            run_s=max(0.0, computing.clock_s - computing.compile_s),
            copy_back_s=time.perf_counter() - self._computed.clock_s,
        )

    def _read_counters(self) -> _Counters:
        return _Counters(
            clock_s=time.perf_counter(),
            reading_s=self._reader.reading_s,
            converting_s=self._reader.converting_s,
            sending_s=self._loader.sending_s,
            compile_s=self._runtime.count_compiles().seconds,
        )


class _Counters(NamedTuple):
    """The clock and all counters at one moment, in seconds; `converting_s` includes `reading_s`."""

    clock_s: float
    reading_s: float
    converting_s: float
    sending_s: float
    compile_s: float

    def since(self, earlier: _Counters) -> _Counters:
        return _Counters(*(now_s - then_s for now_s, then_s in zip(self, earlier, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssembly:
    """A forward pass of a layer that ranks share: each rank holds a piece of every tensor.

    All ranks make the same calls in the same order. On a single rank, the piece is the whole tensor.
    """

    runtime: Runtime
    exposure: Exposure  # the sites that the port exposes, and how each site's pieces make up the whole
    batch_shape: tuple[int, int]  # number of prompts, and tokens of each in this pass
    head_dim: int
    what: str  # target and layer, for errors

    def cut_past(self, layer_input: LayerInput) -> LayerInput:
        """Cut the past down to the heads that this rank holds."""
        if layer_input.past is None:
            return layer_input
        # Values are divided among the ranks as keys are; keys have the layout of the site `k_rope`.
        keys, values = (self.cut(Site.K_ROPE, tensor) for tensor in layer_input.past)
        return replace(layer_input, past=(keys, values))

    def cut(self, site: Site, tensor: torch.Tensor) -> torch.Tensor:
        """Cut this rank's piece out of a site's whole tensor."""
        return self.exposure.cut(site, tensor, ranks=self.runtime.ranks, what=f"{self.what}, {site}")

    def join(self, site: Site, piece: torch.Tensor | None, *, name: str = "") -> torch.Tensor | None:
        """Join the ranks' pieces of a site.

        Args:
            site: The site whose layout over ranks the tensor has.
            piece: This rank's piece, on the CPU; None if nothing was recorded.
            name: Name of the tensor in errors, if it is not the site.

        Returns:
            The whole tensor on the lead. None on other ranks, if no rank shows the site, and if its layout is unknown.
        """
        # Only the lead gets pieces; on other ranks the list is empty.
        pieces = self.runtime.messages.gather(piece)
        missing = [rank for rank, rank_piece in enumerate(pieces) if rank_piece is None]
        if len(missing) == len(pieces):
            return None
        what = f"{self.what}, {name or site}"
        if missing:
            raise TargetError(
                f"{what} shows on some ranks and not on others",
                expected="a tensor on every rank",
                found=f"none on {', '.join(f'rank {rank}' for rank in missing)}",
                next_step="Every rank must call the same submodules.",
            )
        return self.exposure.assemble(site, pieces, self.batch_shape, head_dim=self.head_dim, what=what)

    def join_further(
        self, places: Sequence[FurtherPlace], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Join the ranks' further outputs, by name and on the CPU; {} on ranks other than the lead."""
        if not places:
            return {}
        pieces = self.runtime.messages.gather({name: tensor.to("cpu") for name, tensor in tensors.items()})
        joined: dict[str, torch.Tensor] = {}
        for place in places if pieces else ():
            of_place = [
                {name: tensor for name, tensor in piece.items() if names_place(name, place)}
                for piece in pieces
            ]
            joined |= place.join(of_place, what=self.what)
        return joined

    def join_past(self, key_values: KeyValues) -> KeyValues | None:
        """Join keys and values of all heads, on the CPU; None on ranks other than the lead."""
        keys = self.join(Site.K_ROPE, key_values[0].to("cpu"), name="keys of the past")
        values = self.join(Site.K_ROPE, key_values[1].to("cpu"), name="values of the past")
        return None if keys is None or values is None else (keys, values)


# Names of the arguments that every port gets, in their order.
_ARGUMENTS = ("hidden_states", "attention_mask", "position_ids")


def follow_layers(
    runtime: Runtime,
    *,
    folder: Path,
    kind: type[Target],
    name: str,
    dtype: torch.dtype,
    inputs: Inputs,
    budget_bytes: int | None,
    edits: Mapping[str, TensorEdit],
) -> None:
    """Run this rank's part of every layer that the lead runs, in a setup like the lead's, until its block ends."""
    setup = PortSetup(
        target=kind.find_again(name),
        spec=ModelSpec.from_folder(folder),
        model_source=str(folder),
        dtype=dtype,
        inputs=inputs,
        # The lead's reads fill the page cache that all ranks share.
        prefetch=False,
        budget=MemoryBudget(budget_bytes),
        edits=edits,
    )
    with (
        # `range(0)` requires no shard here: the lead has checked them, and asks only for layers that are present.
        CheckpointReader(folder, layers=range(0)) as reader,
        LayerExecutor(setup, runtime=runtime, reader=reader) as executor,
    ):
        executor.follow()


class LayerExecutor(RankExecutor):
    """A runner of a port's layers; one at a time is in memory. A context manager, whose threads end with the block."""

    def __init__(self, setup: PortSetup, *, runtime: Runtime, reader: CheckpointReader) -> None:
        self.setup = setup
        self.runtime = runtime
        self.reader = reader
        self.footprint = device_footprint(setup, runtime)  # host memory of a layer, from shapes
        self._resident = ResidentLayer(setup, runtime=runtime, reader=reader, footprint=self.footprint)
        self.loader = self._resident.loader

    def _order_to_follow(self) -> Callable[[Runtime], None]:
        return partial(
            follow_layers,
            folder=self.reader.folder,
            kind=type(self.setup.target),
            name=self.setup.target.name,
            dtype=self.setup.dtype,
            inputs=self.setup.inputs,
            budget_bytes=self.setup.budget.limit_bytes,
            edits=self.setup.edits,
        )

    def _close(self) -> None:
        self._resident.close()

    def run(self, request: LayerRequest) -> LayerRun:
        """Run one layer on all ranks, in its calls; its weights are loaded unless it is the layer that ran last.

        Raises:
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
        self.send(partial(LayerExecutor._run_part, request=request))
        run = self._run_part(request)
        assert run is not None, "the lead assembles the parts of all ranks"
        return run

    def release(self) -> None:
        """Free the layer that ran last, on the device and on the host, on all ranks."""
        self.send(LayerExecutor._free)
        self._free()

    def _free(self) -> None:
        self._resident.free()

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
        held_weights = self._join_held(self._resident.take_held(), request.layer)
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

    def _join_held(self, part: HeldPart | None, layer: int) -> HeldWeights | None:
        """Return what all ranks hold of a layer; None on other ranks than the lead, and if nothing was compared."""
        if part is None:
            return None
        parts = self.runtime.messages.gather(part)
        return conclude(parts, self._resident.line_table(layer)) if parts else None

    def _find_exposure(self, module: nn.Module, request: LayerRequest, *, what: str) -> Exposure:
        exposure = find_exposure(module, what=what, kind=self.setup.spec.graph.layer(request.layer))
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
