"""Parts of a split model: bottom, trunk and top, their decoder layers, and the device of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from minimax_tools.errors import BackendError, UsageError
from minimax_tools.model.span import Span
from minimax_tools.text_enum import TextEnum


class Role(TextEnum):
    """Name of a component, as files, device maps and messages have it."""

    BOTTOM = "bottom"
    TRUNK = "trunk"
    TOP = "top"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A component: bottom begins with the embedding, top ends in the final norm and the head.

    Args:
        role: Bottom, trunk or top.
        span: Decoder layers of the component.
        num_hidden_layers: Number of decoder layers in the whole model.

    Raises:
        UsageError: A component of this role cannot have these layers.
    """

    role: Role
    span: Span
    num_hidden_layers: int

    def __post_init__(self) -> None:
        self.span.within(self.num_hidden_layers)
        begins, ends = self.span.start == 0, self.span.stop == self.num_hidden_layers
        if (begins, ends) != (self.role is Role.BOTTOM, self.role is Role.TOP):
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
        also = {Role.BOTTOM: " + embedding", Role.TRUNK: "", Role.TOP: " + final norm + lm_head"}
        numbers = f"{self.span.start}-{self.span.last}" if len(self.span) > 1 else f"{self.span.start}"
        return f"{self.role} (layer{'s' if len(self.span) > 1 else ''} {numbers}{also[self.role]})"


def plan_parts(split_point_1: int, split_point_2: int, *, num_hidden_layers: int) -> tuple[Part, Part, Part]:
    """Divide the layers: bottom ends before `split_point_1`, trunk before `split_point_2`, top has the rest.

    Raises:
        UsageError: A component would have no layer.
    """
    points = (split_point_1, split_point_2)
    is_whole = all(isinstance(point, int) and not isinstance(point, bool) for point in points)
    if not is_whole or not 0 < split_point_1 < split_point_2 < num_hidden_layers:
        raise UsageError(
            "these split points leave a component without layers",
            expected=f"0 < split_point_1 < split_point_2 < {num_hidden_layers}, the number of layers",
            found=f"{split_point_1!r} and {split_point_2!r}",
            next_step="Bottom ends before split_point_1, trunk before split_point_2; both count layers from 0.",
        )
    bounds = (0, split_point_1, split_point_2, num_hidden_layers)
    bottom, trunk, top = (
        Part(role=role, span=Span(start, stop), num_hidden_layers=num_hidden_layers)
        for role, start, stop in zip(Role, bounds, bounds[1:], strict=False)
    )
    return bottom, trunk, top


DeviceName = str | torch.device


def auto_device_map(num_gpus: int) -> Mapping[Role, str]:
    """Return the devices of `device_map="auto"`: GPUs go to trunk and top first.

    | GPUs | bottom | trunk | top |
    |---|---|---|---|
    | 0 | CPU | CPU | CPU |
    | 1 | CPU | GPU 0 | GPU 0 |
    | 2 | CPU | GPU 0 | GPU 1 |
    | 3 or more | GPU 0 | GPU 1 | GPU 2 |

    Raises:
        ValueError: The number is negative.
    """
    if num_gpus < 0:
        raise ValueError(f"num_gpus is {num_gpus}, expected 0 or more")
    rules = (
        ("cpu", "cpu", "cpu"),
        ("cpu", "cuda:0", "cuda:0"),
        ("cpu", "cuda:0", "cuda:1"),
        ("cuda:0", "cuda:1", "cuda:2"),
    )
    return MappingProxyType(dict(zip(Role, rules[min(num_gpus, 3)], strict=True)))


def choose_devices(
    device: DeviceName,
    device_map: str | Mapping[str, DeviceName] | None,
    *,
    num_gpus: int,
) -> Mapping[Role, torch.device]:
    """Choose the device of each component.

    Args:
        device: Device of all components, unless a map is given.
        device_map: None, `auto`, or a device for each of bottom, trunk and top.
        num_gpus: Number of CUDA devices of this machine.

    Raises:
        UsageError: The map is none of these, or a name is not a device.
        BackendError: A device is not on this machine.
    """
    names: Mapping[str, DeviceName]
    if device_map is None:
        names = dict.fromkeys(map(str, Role), device)
    elif device_map == "auto":
        names = {str(role): name for role, name in auto_device_map(num_gpus).items()}
    elif isinstance(device_map, Mapping):
        names = _complete(device_map)
    else:
        raise UsageError(
            "device_map cannot be used",
            expected="None, 'auto', or a dict with a device for each of bottom, trunk and top",
            found=repr(device_map),
            next_step="For a single device give device= alone.",
        )
    return MappingProxyType({role: _parse(role, names[str(role)], num_gpus=num_gpus) for role in Role})


def _complete(device_map: Mapping[str, DeviceName]) -> Mapping[str, DeviceName]:
    # Keys may be `Role`s or plain text.
    names = {str(key): name for key, name in device_map.items()}
    missing = [str(role) for role in Role if str(role) not in names]
    unknown = [key for key in names if key not in {str(role) for role in Role}]
    if missing or unknown:
        faults = [
            *(f"no device for {role}" for role in missing),
            *(f"unknown key {key!r}" for key in unknown),
        ]
        raise UsageError(
            "device_map does not name the three components",
            expected="a device for each of bottom, trunk and top",
            found="; ".join(faults),
        )
    return names


def _parse(role: Role, name: DeviceName, *, num_gpus: int) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"{name!r}, given for {role}, is not a device", expected="for example 'cpu', 'cuda' or 'cuda:1'"
        ) from error
    if device.type == "meta":
        raise UsageError(f"{role} cannot be on the meta device, which holds no data")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= num_gpus:
            raise BackendError(
                f"there is no {device}, which {role} should go to",
                found=f"{num_gpus} CUDA devices",
                next_step="Choose another device, or device_map='auto'.",
            )
    return device
