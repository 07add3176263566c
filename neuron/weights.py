"""Loading: a layer's weights into a module, strictly, one at a time, through host buffers that are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from minimax_tools.errors import Mm2Error, TargetError

_NUM_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """A weight that is written straight into its storage when it is loaded.

    Args:
        shape: Its shape.
        fill: Writes it into the contiguous CPU tensor it is given, of that shape and the place's dtype.
    """

    shape: tuple[int, ...]
    fill: Callable[[torch.Tensor], None]


Weight = torch.Tensor | Deferred


class WeightLoader:
    """Loads weights onto one device, through host buffers that are kept and filled again for the next layer.

    Args:
        device: Where the weights go.
        wait: Waits until everything sent to the device has arrived.
    """

    def __init__(self, device: torch.device, *, wait: Callable[[], None]) -> None:
        self._device = device
        self._wait = wait
        self._buffers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def load(self, module: nn.Module, weights: Mapping[str, Weight], *, what: str) -> None:
        """Fill every parameter and persistent buffer of `module` and move it to the device.

        Each weight is cast to the dtype of the place it goes to; nothing else is cast.

        Args:
            module: On the CPU or already on the device.
            weights: By the module's own names.
            what: The module in words, for errors.

        Raises:
            TargetError: Names are missing or unexpected, or shapes differ, all listed; or one cannot be cast.
        """
        places = dict(module.state_dict(keep_vars=True))
        _refuse_misfits(places, weights, what=what)
        for name in list(places):
            try:
                self._load_one(module, name, places.pop(name), weights[name])
            except Mm2Error:
                raise
            except Exception as error:  # what a port's conversion put there: anything can come
                raise TargetError(
                    f"{what}: the weight {name} cannot be loaded",
                    found=f"{type(error).__name__}: {error}",
                    next_step="Check what convert_state_dict returns for it; see --debug for the traceback.",
                ) from error
        module.to(self._device)

    def _load_one(self, module: nn.Module, name: str, place: torch.Tensor, weight: Weight) -> None:
        if self._device.type == "cpu" and not place.is_meta:
            _fill(place.data, weight)
            return
        host = self._on_host(place, weight)
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        is_parameter = leaf in owner._parameters
        # The old tensor is freed before the new one comes: the device holds one layer, not two.
        _put(owner, leaf, None)
        del place
        moved = host.to(self._device)
        # The host buffer is filled again for the next weight: the transfer must have ended.
        self._wait()
        _put(owner, leaf, nn.Parameter(moved, requires_grad=False) if is_parameter else moved)

    def _on_host(self, place: torch.Tensor, weight: Weight) -> torch.Tensor:
        """The weight on the CPU in the place's dtype; a deferred one in a buffer that others fill again."""
        if isinstance(weight, torch.Tensor):
            return weight.to("cpu", place.dtype)
        key = (place.shape, place.dtype)
        # On the CPU the buffer becomes the weight itself.
        if key not in self._buffers or self._device.type == "cpu":
            self._buffers[key] = torch.empty(place.shape, dtype=place.dtype)
        weight.fill(self._buffers[key])
        return self._buffers[key]


def _put(owner: nn.Module, leaf: str, tensor: torch.Tensor | None) -> None:
    """Set a parameter or buffer in its slot, where plain assignment would check or cast."""
    if leaf in owner._parameters:
        assert tensor is None or isinstance(tensor, nn.Parameter), f"{leaf} is a parameter"
        owner._parameters[leaf] = tensor
    else:
        owner._buffers[leaf] = tensor


def _fill(storage: torch.Tensor, weight: Weight) -> None:
    if isinstance(weight, Deferred):
        weight.fill(storage)
    else:
        storage.copy_(weight)


def _refuse_misfits(places: Mapping[str, torch.Tensor], weights: Mapping[str, Weight], *, what: str) -> None:
    """Compare names and shapes, and name all that do not fit at once."""
    shapes = {name: _shape_of(weight) for name, weight in weights.items()}
    lists = {
        "missing": [name for name in places if name not in shapes],
        "unexpected": [name for name in shapes if name not in places],
        "no tensor": [name for name, shape in shapes.items() if shape is None and name in places],
        "of another shape": [
            f"{name} (expected {list(place.shape)}, found {list(shape)})"
            for name, place in places.items()
            if (shape := shapes.get(name)) is not None and shape != tuple(place.shape)
        ],
    }
    faults = [f"{len(names)} {fault}: {_listed(names)}" for fault, names in lists.items() if names]
    if faults:
        raise TargetError(
            f"{what}: the weights do not fit the module",
            found="; ".join(faults),
            next_step="Give the target a convert_state_dict(tensors, config, layer_idx) that returns the "
            "module's own names and shapes.",
        )


def _shape_of(weight: object) -> tuple[int, ...] | None:
    return tuple(weight.shape) if isinstance(weight, (torch.Tensor, Deferred)) else None


def _listed(names: list[str]) -> str:
    more = len(names) - _NUM_NAMES_SHOWN
    return ", ".join(names[:_NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
