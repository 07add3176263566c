"""Machine: the NeuronCores of this machine and their memory; and a device out of memory, with what to lower.

The runtimes raise a plain RuntimeError, in the forward or only at a synchronisation. It is known by their own codes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from minimax_tools.errors import BackendError

_CODES = (
    "nrt_tensor_allocate status=4",  # the Neuron runtime: a tensor does not fit
    "NRT_RESOURCE",  # the Neuron runtime: a graph's own memory does not fit
    "Failed to alloc DEVICE memory",  # the Neuron driver, in the log that comes with it
    "NCC_EOOM",  # the Neuron compiler: a graph's tensors need more than the device has
    "RESOURCE_EXHAUSTED",  # XLA
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
    """Translate a device's lack of memory in the block; `when` says at what it showed."""
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


_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A family of instances. Its cores are logical ones, as torch sees them; None if their number is unknown."""

    cores_per_device: int | None
    hbm_bytes_per_core: int
    has_native_backend: bool


# Trn2 and Trn3 with their default of two physical cores in one logical core (LNC 2).
_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "trn1": _Family(cores_per_device=2, hbm_bytes_per_core=16 * _GIB, has_native_backend=False),
        "trn1n": _Family(cores_per_device=2, hbm_bytes_per_core=16 * _GIB, has_native_backend=False),
        "inf2": _Family(cores_per_device=2, hbm_bytes_per_core=16 * _GIB, has_native_backend=False),
        "trn2": _Family(cores_per_device=4, hbm_bytes_per_core=24 * _GIB, has_native_backend=True),
        "trn2u": _Family(cores_per_device=4, hbm_bytes_per_core=24 * _GIB, has_native_backend=True),
        "trn3": _Family(cores_per_device=None, hbm_bytes_per_core=36 * _GIB, has_native_backend=True),
    }
)
# Variable with the number of physical cores in one logical core, and its default.
_LNC_VARIABLE, _DEFAULT_LNC = "NEURON_LOGICAL_NC_CONFIG", "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that this process runs on, with the Neuron devices that the driver shows.

    `instance_type` is a name such as `trn1.2xlarge`; None if the firmware names no Neuron instance.
    """

    instance_type: str | None
    num_devices: int

    @classmethod
    def current(cls, *, root: Path = Path("/")) -> Machine:
        """Read the machine from the system's files, below `root`."""
        # On Nitro instances the product is the instance type; elsewhere it is a mainboard's or a hypervisor's name.
        try:
            product = (root / "sys/devices/virtual/dmi/id/product_name").read_text(encoding="utf-8").strip()
        except OSError:
            product = ""
        devices = [path for path in (root / "dev").glob("neuron*") if path.name[len("neuron") :].isdecimal()]
        is_instance = product.partition(".")[0] in _FAMILIES
        return cls(instance_type=product if is_instance else None, num_devices=len(devices))

    @property
    def family(self) -> str | None:
        """The family's name, such as `trn1`; None where unknown."""
        return None if self.instance_type is None else self.instance_type.partition(".")[0]

    @property
    def has_native_backend(self) -> bool | None:
        """True if the native backend runs here; None where the family is unknown."""
        return None if self.family is None else _FAMILIES[self.family].has_native_backend

    @property
    def num_cores(self) -> int | None:
        """The number of logical cores on all devices; None where unknown."""
        if self.family is None:
            return None
        cores = _FAMILIES[self.family].cores_per_device
        return None if cores is None or self._has_custom_lnc else cores * self.num_devices

    @property
    def hbm_bytes_per_core(self) -> int | None:
        """The memory of a logical core; None where unknown."""
        if self.family is None or self._has_custom_lnc:
            return None
        return _FAMILIES[self.family].hbm_bytes_per_core

    @property
    def _has_custom_lnc(self) -> bool:
        """True if logical cores differ from those in the table. Older families do not join cores into logical ones."""
        assert self.family is not None, "asked of a known family"
        return (
            _FAMILIES[self.family].has_native_backend
            and os.environ.get(_LNC_VARIABLE, _DEFAULT_LNC) != _DEFAULT_LNC
        )
