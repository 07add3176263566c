"""LayerExecutor: runs single layers of a target on a device, weights loaded just before, sites recorded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from minimax_tools.capture.recorder import Recorder, copy_on_device, shape_to_batch
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.inputs import Inputs
from minimax_tools.sites import Site
from minimax_tools.spec import ModelSpec
from neuron.exposure import Exposure, find_exposure
from neuron.runtime import Runtime
from neuron.targets import Target
from neuron.weights import WeightLoader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """What one run of one layer gave.

    Args:
        output: The layer's output [B,S,H], still on the device.
        tensors: The sites asked for and exposed, on the CPU.
        not_exposed: The sites asked for that the port does not expose.
        router_dtypes: Dtype of the router gate and of the correction bias as loaded, where they can be told.
    """

    output: torch.Tensor
    tensors: Mapping[Site, torch.Tensor]
    not_exposed: tuple[Site, ...]
    router_dtypes: Mapping[str, str]


class LayerExecutor:
    """Builds, loads and runs a target's layers one after the other.

    Args:
        target: The implementation.
        runtime: The device.
        reader: The checkpoint.
        spec: Its quantities.
        inputs: Mask and positions of every run.
        dtype: Dtype of weights and activations.
    """

    def __init__(
        self,
        *,
        target: Target,
        runtime: Runtime,
        reader: CheckpointReader,
        spec: ModelSpec,
        inputs: Inputs,
        dtype: torch.dtype,
    ) -> None:
        self._target = target
        self._runtime = runtime
        self._reader = reader
        self._spec = spec
        self._inputs = inputs
        self._dtype = dtype
        self._loader = WeightLoader(runtime.device, wait=runtime.synchronise)
        self._attention_mask = inputs.attention_mask.to(runtime.device)
        self._position_ids = inputs.position_ids.to(runtime.device)
        self._resident: nn.Module | None = None

    def run(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        *,
        sites: tuple[Site, ...],
        feeds: Mapping[Site, torch.Tensor] | None = None,
    ) -> LayerRun:
        """Run one layer.

        Args:
            layer: Its number.
            hidden_states: [B,S,H] on the CPU or the device.
            sites: What to record.
            feeds: Tensors to feed at some sites instead of what the port computes there.

        Raises:
            TargetError: The port could not be built, loaded or run, or cannot be fed at a site.
        """
        what = f"target {self._target.name}, layer {layer}"
        module = self._loaded(layer)
        exposure = find_exposure(module, what=what)
        feeds = dict(feeds or {})
        _refuse_unfeedable(exposure, feeds, what=what)
        taps = {site: tap for site, tap in exposure.taps.items() if site in sites or site in feeds}
        recorder = Recorder(module, taps, keep=copy_on_device, feeds=feeds)
        with torch.no_grad(), recorder:
            output = self._forward(module, hidden_states.to(self._runtime.device, self._dtype), what=what)
        self._runtime.synchronise()
        recorded = {
            site: shape_to_batch(site, tensor.to("cpu"), self._inputs)
            for site, tensor in recorder.tensors.items()
            if site in sites
        }
        accepted = {
            site: tensor
            for site, tensor in recorded.items()
            if exposure.accepts(site, tensor, self._inputs, self._spec)
        }
        return LayerRun(
            output=output,
            tensors={site: accepted[site] for site in sites if site in accepted},
            not_exposed=tuple(site for site in sites if site not in accepted),
            router_dtypes=_router_dtypes(module),
        )

    def _loaded(self, layer: int) -> nn.Module:
        """The module with the layer's weights; the old one is gone before a new one is built."""
        tensors = LayerTensors.open(self._reader, self._spec, layer, self._dtype)
        module = self._resident
        self._resident = None
        if module is None or not self._target.is_reused:
            del module
            module = self._target.build(self._spec, layer, dtype=self._dtype)
        self._target.load(module, tensors, self._spec, loader=self._loader)
        self._resident = module
        return module

    def _forward(self, module: nn.Module, hidden_states: torch.Tensor, *, what: str) -> torch.Tensor:
        try:
            output = module(hidden_states, self._attention_mask, self._position_ids)
        except Exception as error:  # the port's own code: anything can come
            raise TargetError(
                f"{what} failed while it ran",
                found=f"{type(error).__name__}: {error}",
                next_step="It is called as module(hidden_states, attention_mask, position_ids); "
                "see --debug for the traceback.",
            ) from error
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(first, torch.Tensor):
            raise TargetError(f"{what} returned no tensor", expected="[B,S,H] or a tuple that begins with it")
        if first.shape != hidden_states.shape:
            if first.numel() != hidden_states.numel():
                raise TargetError(
                    f"{what} returned another shape",
                    expected=str(tuple(hidden_states.shape)),
                    found=str(tuple(first.shape)),
                )
            first = first.reshape(hidden_states.shape)
        return first


def _refuse_unfeedable(exposure: Exposure, feeds: Mapping[Site, torch.Tensor], *, what: str) -> None:
    missing = [str(site) for site in feeds if site not in exposure.taps]
    if missing:
        raise TargetError(
            f"{what} cannot be fed at {', '.join(missing)}: it does not expose them",
            next_step="Name them in the port's `sites`, or run the whole layer: mm2-test single-layer.",
        )


def _router_dtypes(module: nn.Module) -> dict[str, str]:
    """Dtypes of what looks like the router's gate and correction bias, by their usual names."""
    found: dict[str, str] = {}
    for name, tensor in module.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            found["correction_bias"] = str(tensor.dtype).removeprefix("torch.")
        elif name.endswith(("gate.weight", "linear_router.weight")):
            found["router_gate"] = str(tensor.dtype).removeprefix("torch.")
    return found
