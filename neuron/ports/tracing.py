"""Tracing: a target's layer compiled into a file, with its sites as further outputs.

The compiler is torch_neuronx.trace on Neuron, torch.export elsewhere. An argument `what` names target and layer in
errors, and `example` holds the arguments with which compilers run the layer. B batch, S sequence, H hidden.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minimax_tools.capture.recorder import CallPlan, Recorder, copy_on_device, plan_calls, shape_to_batch
from minimax_tools.capture.taps import Tap
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import BackendError, Mm2Error, TargetError
from minimax_tools.json_codec import encode
from minimax_tools.machine.files import make_folder, temporary_beside, whole_path
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.provenance import library_versions
from neuron.devices.backend import Backend
from neuron.devices.weights import WeightLoader
from neuron.ports.exposure import find_exposure
from neuron.ports.returned import find_output
from neuron.ports.target import Target, port_errors
from neuron.ports.traced import DESCRIPTION, EXPORT, NEURON, TracedProgram, load_program
from neuron.process.status import doing

logger = logging.getLogger(__name__)

# Stands for the difference between a number and NaN or Inf: JSON knows no infinity.
_INFINITE = torch.finfo(torch.float64).max
_COMPILERS: Mapping[Backend, str] = {Backend.CPU: EXPORT, Backend.NEURON_XLA: NEURON}


class SitesAsOutputs(nn.Module):
    """A port's layer that returns the sites at `taps`, in this order, beside its output: they survive compilation."""

    def __init__(
        self, layer: nn.Module, taps: Mapping[Site, Tap], *, plans: Mapping[Site, CallPlan], what: str
    ) -> None:
        super().__init__()
        self.layer = layer
        self._taps = dict(taps)
        self._plans = dict(plans)
        self._what = what

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the layer's output [B,S,H], then each site in the port's own shape, its calls joined."""
        # Copies, because a port may work in place.
        states = hidden_states.clone()
        with Recorder(self.layer, self._taps, keep=copy_on_device) as recorder:
            result = self.layer(states, attention_mask.clone(), position_ids.clone())
        output = find_output(result, tuple(hidden_states.shape), what=self._what)
        calls = recorder.calls()
        missing = [str(site) for site in self._taps if site not in calls]
        if missing:
            raise TargetError(
                f"no tensor passed at {', '.join(missing)} while the layer ran",
                next_step="Point the port's `sites` at submodules that it calls.",
            )
        batch_size = hidden_states.shape[0]
        joined = (self._plans[site].join(calls[site].tensors, batch_size) for site in self._taps)
        return (output, *joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A layer to be traced.

    Raises:
        UsageError: The target is compiled already.
        TargetError: The target is more than one program.
        BackendError: Nothing compiles for the backend.
    """

    target: Target
    spec: ModelSpec
    layer: int
    inputs: Inputs  # token rows of one call; the program takes their shape
    dtype: torch.dtype
    backend: Backend  # backend of the program: the CPU, or Neuron over torch_xla
    checks_capture: bool = False  # whether to compile the layer without sites too, and compare the outputs

    def __post_init__(self) -> None:
        self.target.require_traceable(self.backend)
        if self.backend not in _COMPILERS:
            raise BackendError(
                f"nothing compiles a layer into a file for the backend {self.backend}",
                expected=" or ".join(str(backend) for backend in _COMPILERS),
                found=str(self.backend),
                next_step="Use --backend neuron-xla in a virtual environment of torch-neuronx 2.9 or older, or "
                "--backend cpu.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A layer that was traced."""

    description: TracedProgram  # the description in the file: compiler, port, layer, sites, shape and dtype
    effect_of_sites: float | None  # largest change of the output by returning the sites; None if unchecked


def trace_layer(request: TraceRequest, reader: CheckpointReader, output: Path) -> Trace:
    """Compile the layer with its weights into `output`, which is written whole or not at all.

    Raises:
        TargetError: The port cannot be built, loaded, run or compiled.
    """
    what = f"port {request.target.name}, layer {request.layer}"
    module = _load_module(request, reader)
    # Random states: zeros would give all experts the same score.
    generator = torch.Generator().manual_seed(0)
    shape = (request.inputs.batch_size, request.inputs.sequence_length, request.spec.hidden_size)
    states = torch.randn(shape, generator=generator).to(request.dtype)
    example = (states, request.inputs.attention_mask, request.inputs.position_ids)
    with torch.no_grad():
        taps, plans = _find_taps(request, module, example, what=what)
        traced = TracedProgram(
            program=_COMPILERS[request.backend],  # name of the compiler
            port=request.target.name,
            port_digest=request.target.source_digest,
            layer=request.layer,
            sites=tuple(taps),
            shape=shape,
            dtype=request.dtype,
            model=fingerprint_model(reader, request.spec, range(request.layer, request.layer + 1)),
            versions=library_versions(),
        )
        _compile(
            SitesAsOutputs(module, taps, plans=plans, what=what).eval(), example, traced, output, what=what
        )
        effect = (
            _effect_of_sites(module, example, traced, output, what=what) if request.checks_capture else None
        )
    return Trace(description=traced, effect_of_sites=effect)


def _load_module(request: TraceRequest, reader: CheckpointReader) -> nn.Module:
    """Build and load the port's module on the CPU, where compilers want it."""
    module = request.target.build(request.spec, request.layer, dtype=request.dtype)
    with ReadingPool(torch.get_num_threads()) as pool:
        # Weights for the CPU are not sent anywhere: there is nothing to wait for.
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=pool)
        tensors = LayerTensors.open(reader, request.spec, request.layer, request.dtype)
        request.target.load(module, tensors, request.spec, loader=loader)
    return module


def _find_taps(
    request: TraceRequest, module: nn.Module, example: tuple[torch.Tensor, ...], *, what: str
) -> tuple[dict[Site, Tap], dict[Site, CallPlan]]:
    """Run the port once; return the taps at which sites show, and how the calls of each are joined.

    Input and output of the layer are not among them.
    """
    exposure = find_exposure(module, what=what, kind=request.spec.graph.layer(request.layer))
    # All programs have input and output.
    always = (Site.INPUT, Site.OUTPUT)
    taps: dict[Site, Tap] = {site: tap for site, tap in exposure.taps.items() if site not in always}
    with Recorder(module, taps, keep=copy_on_device) as recorder:
        next_step = "Try it with mm2-test single-layer first; see --debug for the traceback."
        with port_errors(f"{what} failed while it ran", activity=f"running {what}", next_step=next_step):
            result = module(*(tensor.clone() for tensor in example))
    # Checked before compilation: a compiler would print its graph first.
    find_output(result, tuple(example[0].shape), what=what)
    batch_shape = (request.inputs.batch_size, request.inputs.sequence_length)
    calls = recorder.calls()
    plans = plan_calls(calls, batch_shape)
    tensors = {
        site: shape_to_batch(
            site,
            plan.join(calls[site].tensors, batch_shape[0]),
            batch_shape,
            head_dim=request.spec.head_dim,
        )
        for site, plan in plans.items()
    }
    shown = {
        site: tap
        for site, tap in taps.items()
        if site in tensors and exposure.accepts(site, tensors[site], request.spec, batch_shape)
    }
    return shown, plans


def _effect_of_sites(
    module: nn.Module, example: tuple[torch.Tensor, ...], traced: TracedProgram, output: Path, *, what: str
) -> float:
    """Return the largest change of the output by returning the sites, for which a compiler may fuse less."""
    bare = replace(traced, sites=())
    with temporary_beside(output) as bare_path:
        _compile(SitesAsOutputs(module, {}, plans={}, what=what).eval(), example, bare, bare_path, what=what)
        bare_output = load_program(bare_path, bare)(*example)[0]
    output_beside_sites = load_program(output, traced)(*example)[0]
    difference = (output_beside_sites.double() - bare_output.double()).abs()
    difference[output_beside_sites.isnan() & bare_output.isnan()] = 0
    return float(difference.nan_to_num(nan=_INFINITE, posinf=_INFINITE).max())


def _compile(
    wrapper: SitesAsOutputs, example: tuple[Any, ...], traced: TracedProgram, output: Path, *, what: str
) -> None:
    """Compile the layer into `output`, with its description as an extra file of the archive."""
    extra_files = {DESCRIPTION: json.dumps(encode(traced))}
    make_folder(output.parent)
    try:
        with (
            whole_path(output) as temporary,
            doing(f"compiling layer {traced.layer} of port {traced.port}"),
        ):
            if traced.program == NEURON:
                _compile_for_neuron(wrapper, example, extra_files, temporary)
            else:
                _compile_for_cpu(wrapper, example, extra_files, temporary)
    except (OSError, Mm2Error):
        raise
    except (Exception, SystemExit) as error:  # any error of a compiler or the port's code
        # The graph may follow.
        first_line = str(error).strip().partition("\n")[0]
        raise TargetError(
            f"{what} cannot be compiled by {traced.program}",
            found=f"{type(error).__name__}: {first_line}",
            next_step="A program has fixed shapes: no `if`, loop or index may depend on a tensor's values; see "
            "--debug for the traceback.",
        ) from error


def _compile_for_cpu(
    wrapper: SitesAsOutputs, example: tuple[Any, ...], extra_files: dict[str, str], path: Path
) -> None:
    printed = io.StringIO()
    _make_integers_buffers(wrapper)
    try:
        with redirect_stderr(printed), _fakes_as_plain():
            program = torch.export.export(wrapper, example)
    except Exception:
        # torch prints the whole graph, hundreds of lines before the cause.
        logger.debug("torch.export printed:\n%s", printed.getvalue())
        raise
    if printed.getvalue():
        logger.warning("torch.export printed:\n%s", printed.getvalue())
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files=extra_files)


@contextmanager
def _fakes_as_plain() -> Iterator[None]:
    """Let the fake tensors with which torch.export runs a layer count as plain ones.

    NxDI makes every tensor plain that is not, by `as_subclass`, which torch refuses for fakes.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    fakes: Any = FakeTensor
    fakes.as_subclass = lambda fake, _: fake
    try:
        yield
    finally:
        del fakes.as_subclass


def _make_integers_buffers(module: nn.Module) -> None:
    """Turn parameters of integers, such as a rank's number, into buffers: torch 2.9 cannot load them from a file."""
    for part in module.modules():
        for name, parameter in tuple(part.named_parameters(recurse=False)):
            if not parameter.is_floating_point():
                delattr(part, name)
                part.register_buffer(name, parameter.data)


def _compile_for_neuron(
    wrapper: SitesAsOutputs, example: tuple[Any, ...], extra_files: dict[str, str], path: Path
) -> None:
    import torch_neuronx

    # Weights stay beside the NEFF: the compiler cannot take 7 GB of constants.
    program = torch_neuronx.trace(wrapper, example, inline_weights_to_neff=False)
    torch.jit.save(program, str(path), _extra_files=extra_files)
