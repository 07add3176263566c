"""A device out of memory: recognised by what runtimes and compilers raise, and answered by what to lower.

The runtimes raise a plain RuntimeError, in the forward or only at a synchronisation. It is known by their own codes:

| code | raised by |
|---|---|
| `nrt_tensor_allocate status=4`, `NRT_RESOURCE` | the Neuron runtime: a tensor, or a graph's own memory, does not fit |
| `Failed to alloc DEVICE memory` | the Neuron driver, in the log that comes with it |
| `NCC_EOOM` | the Neuron compiler: a graph's tensors need more than the device has |
| `RESOURCE_EXHAUSTED` | XLA |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minimax_tools.errors import BackendError

_CODES = (
    "nrt_tensor_allocate status=4",
    "NRT_RESOURCE",
    "Failed to alloc DEVICE memory",
    "NCC_EOOM",
    "RESOURCE_EXHAUSTED",
)
_LONGEST_FOUND = 300

# What a user can lower, the most effective first.
LOWER = (
    "Divide the layer among more ranks (--tp-degree), take fewer or shorter rows (a golden of a smaller --seq-len or "
    "--batch-size), or record fewer sites (--sites layer)."
)


def is_out_of_device_memory(error: BaseException | None) -> bool:
    """Decide whether a device's lack of memory raised an error, or caused it."""
    if error is None:
        return False
    if isinstance(error, torch.OutOfMemoryError) or any(code in str(error) for code in _CODES):
        return True
    return is_out_of_device_memory(error.__cause__ or error.__context__)


@contextmanager
def device_memory_errors(when: str) -> Iterator[None]:
    """Translate a device's lack of memory in the block; `when` says at what it showed.

    Raises:
        BackendError: The device is out of memory.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch_xla raises either
        if not is_out_of_device_memory(error):
            raise
        raise BackendError(
            f"the device is out of memory, which showed {when}", found=shorten(error), next_step=LOWER
        ) from error


def shorten(error: BaseException) -> str:
    """Return an error's class and the beginning of its message, which may go on for pages."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_LONGEST_FOUND]}{'…' if len(text) > _LONGEST_FOUND else ''}"
