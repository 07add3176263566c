"""torch.neuron: one device, which is always there."""

from __future__ import annotations

import torch

_device = torch.ops.torch_neuron_stand_in


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: object) -> None:
    """There is one device."""


def synchronize(device: object = None) -> None:
    _device.synchronize()


def max_memory_allocated(device: object = None) -> int:
    return int(_device.most_bytes_in_use())


def manual_seed_all(seed: int) -> None:
    """The device draws no random numbers."""
