"""Recording: the tensors at a module's sites, kept while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from minimax_tools.capture.further import (
    FurtherRecorder,
    parse_further,
    require_further,
    verify_further,
)
from minimax_tools.capture.recorder import Calls, Recorder, copy_on_device, join_calls
from minimax_tools.errors import UsageError
from minimax_tools.model.sites import Site
from neuron.devices.backend import Backend
from neuron.ports.exposure import Exposure, find_exposure, read_exposure

# Names of mm2's backends by type of torch device. Limits are measured on some of them.
_BACKENDS: Mapping[str, str] = MappingProxyType({"cpu": str(Backend.CPU), "neuron": str(Backend.NEURON)})


@dataclass(slots=True, kw_only=True, eq=False)
class Recording:
    """The tensors at a module's sites, from the one time that it ran in a `record` block.

    It is complete once the block has ended.
    """

    name: str  # name of the module's class
    exposure: Exposure  # the sites that the module shows
    tensors: Mapping[Site, torch.Tensor]  # by site, on the CPU
    further: Mapping[str, torch.Tensor] = field(default_factory=dict)  # further outputs by name, on the CPU
    backend: str = "unknown"  # backend that computed, such as `cpu`
    num_calls: int = 0  # number of times that the module was called
    # How often it computed sites whose parts do not add up to the batch; they are left out.
    num_parts: Mapping[Site, int] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Sites that were recorded, in execution order."""
        return tuple(site for site in Site if site in self.tensors)

    def __getitem__(self, site: str) -> torch.Tensor:
        """Return the tensor of a site; a KeyError lists the sites that were recorded."""
        try:
            return self.tensors[Site(site)]
        except (KeyError, ValueError):
            raise KeyError(f"{site}; recorded: {', '.join(self.sites) or 'nothing'}") from None

    def require_one_call(self) -> None:
        """Raise unless the module ran once.

        Raises:
            UsageError: It did not run, or more than once.
        """
        if self.num_calls != 1:
            raise UsageError(
                f"{self.name} ran {self.num_calls} times in its record block",
                expected="one call, whose sites are judged",
                next_step="Call the module itself, not its forward(), and once in the block.",
            )

    def __repr__(self) -> str:
        return f"Recording({self.name} on {self.backend}: {', '.join(self.sites) or 'nothing yet'})"


@contextmanager
def record(
    module: nn.Module, *, sites: Mapping[str, str] | None = None, also: Mapping[str, str] | None = None
) -> Iterator[Recording]:
    """Record the sites of a decoder layer while the block runs; the module is called in it, once.

        with mm2.record(port) as run:
            port(hidden_states, attention_mask, position_ids)

    Values are copied as the module computes them, and come to the CPU when the block ends. Gradients are not kept.

    Args:
        module: The layer. It returns its output, or a tuple that begins with it.
        sites: Place of each site, such as `{"moe_delta": "moe", "attn_context": "self_attn.o_proj:input"}`. Default:
            the module's own attribute `sites`; else submodules with the usual names are found.
        also: Place of each further output, such as `{"cache": ":output[1]"}`, kept in `Recording.further`.

    Raises:
        TargetError: A place names a submodule that the module does not have, or no tensor passed at a further one.
        UsageError: At the end of the block: the module did not run, or more than once.
    """
    name = type(module).__name__
    exposure = find_exposure(module, what=name) if sites is None else read_exposure(module, sites, what=name)
    recording = Recording(name=name, exposure=exposure, tensors={})
    recorder = Recorder(module, exposure.taps, keep=copy_on_device)
    places = parse_further(f"{place_name}={place}" for place_name, place in (also or {}).items())
    verify_further(module, places, what=name)
    further = FurtherRecorder(module, places, keep=copy_on_device)
    counter = module.register_forward_pre_hook(_count_calls(recording))
    try:
        with recorder, further:
            yield recording
    finally:
        counter.remove()
    recording.require_one_call()
    require_further(places, further.tensors, what=name)
    recording.further = MappingProxyType({key: kept.to("cpu") for key, kept in further.tensors.items()})
    recording.backend = _backend_of(recorder.tensors)
    calls = {
        site: Calls(*(tuple(tensor.to("cpu") for tensor in group) for group in of_site))
        for site, of_site in recorder.calls().items()
    }
    joined = join_calls(calls, _batch_shape(recorder.tensors))
    recording.tensors = MappingProxyType(joined)
    recording.num_parts = {site: len(calls[site].tensors) for site in calls if site not in joined}


def _batch_shape(tensors: Mapping[Site, torch.Tensor]) -> tuple[int, int]:
    """Return the shape [B,S] of the module's input; (0, 0) if it is not known."""
    states = tensors.get(Site.INPUT)
    return (0, 0) if states is None or states.ndim < 3 else (states.shape[0], states.shape[1])


def backend_name(device: torch.device) -> str:
    """Return mm2's name of the backend behind a torch device; the device's type for one that mm2 does not know."""
    if device.type == "xla":
        return str(Backend.XLA_CPU if os.environ.get("PJRT_DEVICE") == "CPU" else Backend.NEURON_XLA)
    return _BACKENDS.get(device.type, device.type)


def _count_calls(recording: Recording) -> Callable[[nn.Module, Any], None]:
    def count(_: nn.Module, __: Any) -> None:
        recording.num_calls += 1

    return count


def _backend_of(tensors: Mapping[Site, torch.Tensor]) -> str:
    devices = [kept.device for site, kept in tensors.items() if site is not Site.INPUT]
    return backend_name(devices[0]) if devices else "unknown"
