"""Loading: a layer's weights into a module, strictly, in place where it can be, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from minimax_tools.errors import TargetError

_NUM_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """A weight that is written straight into its storage when it is loaded.

    Args:
        fill: Writes the weight into the contiguous CPU tensor it is given, of the place's shape and dtype.
    """

    fill: Callable[[torch.Tensor], None]


Weight = torch.Tensor | Deferred


class WeightLoader:
    """Loads weights onto one device, through host buffers that are kept and reused."""

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
            TargetError: Names are missing or unexpected, or a shape differs; all are listed.
        """
        places = dict(module.state_dict(keep_vars=True))
        _refuse_other_names(places, weights, what=what)
        faults = [
            f"{name}: expected {tuple(place.shape)}, found {tuple(weight.shape)}"
            for name, place in places.items()
            if isinstance(weight := weights[name], torch.Tensor) and weight.shape != place.shape
        ]
        if faults:
            raise TargetError(
                f"{what}: weights have other shapes than the module",
                found=_listed(faults),
                next_step="Return the module's own shapes from convert_state_dict.",
            )
        for name in list(places):
            self._load_one(module, name, places.pop(name), weights[name])
        module.to(self._device)

    def _load_one(self, module: nn.Module, name: str, place: torch.Tensor, weight: Weight) -> None:
        if self._device.type == "cpu":
            _fill(place.data, weight)
            return
        host = self._buffer(place)
        _fill(host, weight)
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        held = owner._parameters if leaf in owner._parameters else owner._buffers
        is_parameter = isinstance(place, nn.Parameter)
        # The old tensor is freed before the new one comes: the device holds one layer, not two.
        held[leaf] = None
        del place
        moved = host.to(self._device)
        # The host buffer is filled again for the next weight: the copy must have ended.
        self._wait()
        held[leaf] = nn.Parameter(moved, requires_grad=False) if is_parameter else moved

    def _buffer(self, place: torch.Tensor) -> torch.Tensor:
        key = (place.shape, place.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(place.shape, dtype=place.dtype)
        return self._buffers[key]


def _fill(storage: torch.Tensor, weight: Weight) -> None:
    if isinstance(weight, Deferred):
        weight.fill(storage)
    else:
        storage.copy_(weight)


def _refuse_other_names(places: Mapping[str, torch.Tensor], weights: Mapping[str, Weight], *, what: str) -> None:
    missing = [name for name in places if name not in weights]
    unexpected = [name for name in weights if name not in places]
    if missing or unexpected:
        parts = [f"{len(missing)} missing: {_listed(missing)}"] if missing else []
        parts += [f"{len(unexpected)} unexpected: {_listed(unexpected)}"] if unexpected else []
        raise TargetError(
            f"{what}: the weights do not fit the module's names",
            found="; ".join(parts),
            next_step="Give the target a convert_state_dict(tensors, config, layer_idx) that returns the module's names.",
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _NUM_NAMES_SHOWN
    return ", ".join(names[:_NUM_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
