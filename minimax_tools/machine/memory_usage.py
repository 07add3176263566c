"""Memory of this process: a reading (`MemoryUsage`), one with a label (`MemorySnapshot`), and peaks (`MemoryPeak`).

| kind | memory |
|---|---|
| anonymous | allocated and written to |
| file-backed | pages of mapped files, which the system drops and reads again as it likes |
| shared | shared with other processes, as tensors may be |
| device | tensors of torch on each CUDA device |
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import psutil

_STATUS = Path("/proc/self/status")
# Resident memory of the three kinds, swapped memory, and the peak (high water mark) of all resident memory.
_STATUS_LINE = re.compile(r"^(RssAnon|RssFile|RssShmem|VmSwap|VmHWM):\s*(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Memory of this process at one moment, in bytes.

    Linux tells the kinds apart. On other systems `are_kinds_known` is False, and `anonymous_bytes` is all resident
    memory: too high rather than too low.
    """

    anonymous_bytes: int  # resident, so without swapped pages
    file_bytes: int = 0  # resident
    shared_bytes: int = 0  # resident
    swapped_bytes: int = 0  # anonymous memory that is swapped out
    most_resident_bytes: int | None = None  # peak since the process began; None if unknown
    # Bytes of torch's tensors by CUDA device, such as `cuda:0`, now and at their peak since the process began or
    # torch's counters were reset; empty until this process uses CUDA.
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    most_device_bytes: Mapping[str, int] = field(default_factory=dict)
    are_kinds_known: bool = True  # whether anonymous, file-backed and shared memory are told apart

    def __post_init__(self) -> None:
        for name in ("device_bytes", "most_device_bytes"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @classmethod
    def current(cls) -> MemoryUsage:
        """Read this process's memory, on the host and on every device."""
        host = cls.on_host()
        torch = sys.modules.get("torch")
        # Asking for a device's memory would initialise CUDA, which takes hundreds of megabytes.
        if torch is None or not torch.cuda.is_initialized():
            return host
        devices = range(torch.cuda.device_count())
        return replace(
            host,
            device_bytes={f"cuda:{index}": torch.cuda.memory_allocated(index) for index in devices},
            most_device_bytes={f"cuda:{index}": torch.cuda.max_memory_allocated(index) for index in devices},
        )

    @classmethod
    def on_host(cls) -> MemoryUsage:
        """Read this process's memory on the host alone, in some ten microseconds."""
        try:
            return cls.from_status(_STATUS.read_text(encoding="ascii", errors="replace"))
        except (OSError, KeyError):
            return cls.undivided()

    @classmethod
    def from_status(cls, status: str) -> MemoryUsage:
        """Read the text of Linux's `/proc/PID/status`.

        Raises:
            KeyError: The text does not tell the kinds apart, as in some sandboxes.
        """
        # Linux writes kB for 1024 bytes.
        sizes = {key: int(number) * 1024 for key, number in _STATUS_LINE.findall(status)}
        return cls(
            anonymous_bytes=sizes["RssAnon"],
            file_bytes=sizes["RssFile"],
            shared_bytes=sizes["RssShmem"],
            swapped_bytes=sizes.get("VmSwap", 0),
            most_resident_bytes=sizes.get("VmHWM"),
        )

    @classmethod
    def undivided(cls) -> MemoryUsage:
        """Read all resident memory as one kind, on systems without /proc."""
        return cls(anonymous_bytes=psutil.Process().memory_info().rss, are_kinds_known=False)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the process in the machine's memory: anonymous, file-backed and shared."""
        return self.anonymous_bytes + self.file_bytes + self.shared_bytes

    @property
    def all_devices_bytes(self) -> int:
        """Bytes on all devices."""
        return sum(self.device_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """Peaks of a process's memory, in bytes, each at its own moment.

    The kernel and torch record the highest `resident_bytes` and `device_bytes`, so a peak above all earlier ones is
    exact. Other peaks are the highest samples.
    """

    anonymous_bytes: int = 0
    file_bytes: int = 0
    resident_bytes: int = 0
    device_bytes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_bytes", MappingProxyType(dict(self.device_bytes)))

    @property
    def all_devices_bytes(self) -> int:
        """Sum of the devices' peaks, which may lie at different moments."""
        return sum(self.device_bytes.values())

    def raised_by(self, usage: MemoryUsage, *, since: MemoryUsage) -> MemoryPeak:
        """Return this peak, raised by a reading.

        The peaks that the reading itself holds (`most_…`) count only if they rose after the reading `since`.
        """
        return MemoryPeak(
            anonymous_bytes=max(self.anonymous_bytes, usage.anonymous_bytes),
            file_bytes=max(self.file_bytes, usage.file_bytes),
            resident_bytes=max(
                self.resident_bytes,
                usage.resident_bytes,
                _if_risen(usage.most_resident_bytes, since.most_resident_bytes),
            ),
            device_bytes={**self.device_bytes}
            | {
                device: max(
                    self.device_bytes.get(device, 0),
                    num_bytes,
                    _if_risen(usage.most_device_bytes.get(device), since.most_device_bytes.get(device)),
                )
                for device, num_bytes in usage.device_bytes.items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """A labelled reading."""

    label: str  # name of the moment, such as "layer 7 loaded"
    usage: MemoryUsage
    peak_anonymous_bytes: int  # peak of anonymous memory since the snapshot before, or the start


def _if_risen(counted: int | None, before: int | None) -> int:
    """Return a peak counter if it rose since an earlier reading, else 0."""
    return counted if counted is not None and counted > (before or 0) else 0
