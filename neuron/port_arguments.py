"""Port arguments: the options that name a port, its device, dtype and ranks, as words of a command line."""

from __future__ import annotations

import torch

from minimax_tools.capture.digests import dtype_name
from neuron.devices.ranks import Ranks
from neuron.options import DeviceOptions


def port_arguments(options: DeviceOptions) -> tuple[str, ...]:
    """Return the options that name a port, its device, dtype and ranks, as a command takes them."""
    return name_port(target=options.target, backend=options.backend, dtype=options.dtype, ranks=options.ranks)


def name_port(*, target: str, backend: str, dtype: torch.dtype, ranks: Ranks) -> tuple[str, ...]:
    """Return the options of any command that name a port, its device, dtype and ranks."""
    words = ["--target", target, "--backend", backend]
    words += [] if dtype is torch.bfloat16 else ["--dtype", dtype_name(dtype)]
    for name, value in ranks.as_json().items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(words)
