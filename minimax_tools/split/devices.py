"""Devices of a split model's three components: bottom, trunk and top."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from minimax_tools.errors import BackendError, UsageError
from minimax_tools.split.parts import Role

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
    # By the number of GPUs, 0 to 3.
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
        names = _check_device_map(device_map)
    else:
        raise UsageError(
            "device_map cannot be used",
            expected="None, 'auto', or a dict with a device for each of bottom, trunk and top",
            found=repr(device_map),
            next_step="For a single device give device= alone.",
        )
    return MappingProxyType({role: _parse_device(role, names[str(role)], num_gpus=num_gpus) for role in Role})


def _check_device_map(device_map: Mapping[str, DeviceName]) -> Mapping[str, DeviceName]:
    """Return the map with plain text as keys, after checking that it names the three components."""
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
