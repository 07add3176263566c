"""torch.neuron: one device, which is always there."""

from __future__ import annotations

import os

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
    """Wait for the device; with TORCH_NEURON_STAND_IN_FULL its memory proves too small only now."""
    if "TORCH_NEURON_STAND_IN_FULL" in os.environ:
        raise RuntimeError('nrt_tensor_allocate status=4 message="Allocation Failure"')
    _device.synchronize()


def max_memory_allocated(device: object = None) -> int:
    return int(_device.most_bytes_in_use())


def manual_seed_all(seed: int) -> None:
    """The device draws no random numbers."""
