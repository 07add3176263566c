"""Which device holds which component."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from minimax_tools.errors import BackendError, UsageError
from minimax_tools.split.parts import Role

DeviceName = str | torch.device
AUTO = "auto"


def auto_device_map(num_gpus: int) -> Mapping[Role, str]:
    """The rule of `auto`: the trunk goes to a GPU first, bottom only where there is one to spare.

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
    """Where each component goes.

    Args:
        device: For all of them, where there is no map.
        device_map: None, `auto`, or a device for each of bottom, trunk and top.
        num_gpus: How many CUDA devices this machine has.

    Raises:
        UsageError: The map is none of these, or a name is no device's.
        BackendError: A device is not on this machine.
    """
    names: Mapping[str, DeviceName]
    if device_map is None:
        names = dict.fromkeys(map(str, Role), device)
    elif device_map == AUTO:
        names = {str(role): name for role, name in auto_device_map(num_gpus).items()}
    elif isinstance(device_map, Mapping):
        names = _complete(device_map)
    else:
        raise UsageError(
            "device_map is neither a map nor a rule",
            expected="None, 'auto', or a dict with a device for each of bottom, trunk and top",
            found=repr(device_map),
            next_step="For one device give device= alone.",
        )
    return MappingProxyType({role: _parse(role, names[str(role)], num_gpus=num_gpus) for role in Role})


def _complete(device_map: Mapping[str, DeviceName]) -> Mapping[str, DeviceName]:
    # A Role is a str, but as a key it may be written either way.
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
            f"{name!r}, given for {role}, is no device", expected="for example 'cpu', 'cuda' or 'cuda:1'"
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
