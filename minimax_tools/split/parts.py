"""Parts of a split model, also called components: bottom, trunk and top, with their decoder layers and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from minimax_tools.errors import BackendError, UsageError, shorten
from minimax_tools.model.span import MAX_LAYERS, Span
from minimax_tools.text_enum import TextEnum

DeviceName = str | torch.device


class Role(TextEnum):
    """Name of a component, as files, device maps and messages have it."""

    BOTTOM = "bottom"
    TRUNK = "trunk"
    TOP = "top"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A component: bottom begins with the embedding, top ends in the final norm and the head.

    Raises:
        UsageError: A component of this role cannot have these layers.
    """

    role: Role
    span: Span  # decoder layers of the component
    num_hidden_layers: int  # of the whole model

    def __post_init__(self) -> None:
        if self.num_hidden_layers > MAX_LAYERS:
            raise UsageError(
                f"a model of {shorten(str(self.num_hidden_layers))} layers cannot be split",
                expected=f"at most {MAX_LAYERS} layers",
                next_step="Copy the files of the component again.",
            )
        self.span.within(self.num_hidden_layers)
        has_first, has_last = self.span.start == 0, self.span.stop == self.num_hidden_layers
        if (has_first, has_last) != (self.role is Role.BOTTOM, self.role is Role.TOP):
            raise UsageError(
                f"{self.span} cannot be the {self.role} of a model of {self.num_hidden_layers} layers",
                expected="bottom to begin with layer 0, top to end with the last layer, trunk to do neither",
            )

    @property
    def layers(self) -> range:
        """Numbers of the decoder layers."""
        return range(self.span.start, self.span.stop)

    @property
    def has_embedding(self) -> bool:
        """True if the component takes token ids, not hidden states."""
        return self.role is Role.BOTTOM

    @property
    def has_head(self) -> bool:
        """True if the component gives logits, not hidden states."""
        return self.role is Role.TOP

    def __str__(self) -> str:
        other_modules = {Role.BOTTOM: " + embedding", Role.TRUNK: "", Role.TOP: " + final norm + lm_head"}
        one_layer = len(self.span) == 1
        layers = f"layer {self.span.start}" if one_layer else f"layers {self.span.start}-{self.span.last}"
        return f"{self.role} ({layers}{other_modules[self.role]})"


def plan_parts(split_point_1: int, split_point_2: int, *, num_hidden_layers: int) -> tuple[Part, Part, Part]:
    """Divide the layers: bottom ends before `split_point_1`, trunk before `split_point_2`, top has the rest.

    Raises:
        UsageError: A component would have no layer.
    """
    points = (split_point_1, split_point_2)
    are_integers = all(isinstance(point, int) and not isinstance(point, bool) for point in points)
    if not are_integers or not 0 < split_point_1 < split_point_2 < num_hidden_layers:
        raise UsageError(
            "these split points leave a component without layers",
            expected=f"0 < split_point_1 < split_point_2 < {num_hidden_layers}, the number of layers",
            found=f"{split_point_1!r} and {split_point_2!r}",
            next_step="Bottom ends before split_point_1, trunk before split_point_2; both count layers from 0.",
        )
    bounds = (0, split_point_1, split_point_2, num_hidden_layers)
    # Each component lies between two neighbouring bounds.
    bottom, trunk, top = (
        Part(role=role, span=Span(start, stop), num_hidden_layers=num_hidden_layers)
        for role, start, stop in zip(Role, bounds, bounds[1:], strict=False)
    )
    return bottom, trunk, top


# Devices of bottom, trunk and top with `device_map="auto"`, by the number of GPUs: 0 to 3.
_AUTO_DEVICES = (
    ("cpu", "cpu", "cpu"),
    ("cpu", "cuda:0", "cuda:0"),
    ("cpu", "cuda:0", "cuda:1"),
    ("cuda:0", "cuda:1", "cuda:2"),
)


def choose_devices(
    device: DeviceName, device_map: str | Mapping[str, DeviceName] | None, *, num_gpus: int
) -> Mapping[Role, torch.device]:
    """Choose the device of each component.

    Args:
        device: Device of all components, unless a map is given.
        device_map: None, `auto` (see `_AUTO_DEVICES`), or a device for each of bottom, trunk and top.
        num_gpus: Number of CUDA devices of this machine.

    Raises:
        UsageError: The map is none of these, or a name is not a device.
        BackendError: A device is not on this machine.
    """
    names: Mapping[str, DeviceName]
    if device_map is None:
        names = dict.fromkeys(map(str, Role), device)
    elif device_map == "auto":
        names = dict(zip(map(str, Role), _AUTO_DEVICES[min(num_gpus, 3)], strict=True))
    elif isinstance(device_map, Mapping) and {str(key) for key in device_map} == set(map(str, Role)):
        names = {str(key): name for key, name in device_map.items()}
    else:
        raise UsageError(
            "device_map cannot be used",
            expected="None, 'auto', or a dict with a device for each of bottom, trunk and top",
            found=repr(device_map),
            next_step="For a single device give device= alone.",
        )
    return MappingProxyType({role: _parse_device(role, names[str(role)], num_gpus=num_gpus) for role in Role})


def _parse_device(role: Role, name: DeviceName, *, num_gpus: int) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"{name!r}, given for {role}, is not a device", expected="for example 'cpu', 'cuda' or 'cuda:1'"
        ) from error
    if device.type == "meta":
        raise UsageError(f"{role} cannot be on the meta device, which holds no data")
    if device.type == "cuda":
        # `cuda` alone is the first GPU.
        device = torch.device("cuda", device.index or 0)
        if device.index >= num_gpus:
            raise BackendError(
                f"there is no {device}, which {role} should go to",
                found=f"{num_gpus} CUDA devices",
                next_step="Choose another device, or device_map='auto'.",
            )
    return device
