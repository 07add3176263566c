"""A budget for this process's memory, readings of it, and the memory that it can still take.

| kind | memory |
|---|---|
| anonymous | allocated and written to |
| file-backed | pages of mapped files, which the system drops and reads again as it likes |
| shared | shared with other processes, as tensors may be |
| device | tensors of torch on each CUDA device |

Budgets count anonymous memory, swapped pages included. Systems other than Linux do not tell the kinds apart: there all
resident memory counts.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import psutil

from minimax_tools.errors import CannotRunError
from minimax_tools.machine.size import format_size

# Folder below which every group has its own folder, in cgroups of version 1 and 2.
_V1_MOUNT, _V2_MOUNT = "sys/fs/cgroup/memory", "sys/fs/cgroup"
# Files of a group's folder, in version 1 and then 2: its limits, of which the lowest holds, and its bytes in use.
_LIMIT_FILES = ("memory.limit_in_bytes", "memory.max", "memory.high")
_USAGE_FILES = ("memory.usage_in_bytes", "memory.current")
# Keys of the page cache in memory.stat. Version 1 has them once more for the group and those below, as `total_…`.
_CACHE_KEYS = ("active_file", "inactive_file")


def cgroup_headroom_bytes(*, root: Path = Path("/")) -> int | None:
    """Return the bytes that this process's cgroup and its parents still allow; None without a limit.

    The page cache counts as free: the kernel drops it before it refuses memory. `root` is the folder that holds `proc`
    and `sys`; tests give another one.
    """
    headrooms = [_headroom(folder) for folder in _limiting_folders(root)]
    return min((headroom for headroom in headrooms if headroom is not None), default=None)


def _limiting_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory groups and of their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        # No Linux, or no cgroups: there is no limit.
        return
    for line in lines:
        # A line is `id:controllers:path`; version 2 names no controllers.
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield from _group_and_parents(root / _V1_MOUNT, group)
        elif not controllers:
            yield from _group_and_parents(root / _V2_MOUNT, group)


def _group_and_parents(mount: Path, group: str) -> Iterator[Path]:
    """Yield the folders of the group and its parents, up to the mount. In a container only the mount may exist."""
    folder = mount / group.strip("/")
    yield folder
    while folder != mount:
        folder = folder.parent
        yield folder


def _headroom(folder: Path) -> int | None:
    """Return the bytes that one group still allows; None if it sets no limit."""
    limits = _read_numbers(folder, _LIMIT_FILES)
    usages = _read_numbers(folder, _USAGE_FILES)
    if not limits or not usages:
        return None
    # A folder has the files of one version only, so there is one usage.
    return max(min(limits) - usages[0] + _cached_bytes(folder), 0)


def _cached_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counters = dict(line.split() for line in lines)
    return sum(int(counters.get(f"total_{key}", counters.get(key, 0))) for key in _CACHE_KEYS)


def _read_numbers(folder: Path, names: tuple[str, ...]) -> list[int]:
    """Read the bytes in each of these files, without those that are missing or say `max`."""
    paths = [folder / name for name in names]
    texts = [path.read_text(encoding="ascii").strip() for path in paths if path.is_file()]
    return [int(text) for text in texts if text.isdigit()]


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


# Share of the free memory to plan with. The rest is for memory that cannot be computed from shapes.
_PLANNED_SHARE = 0.9


class MemoryBudgetError(CannotRunError):
    """A step that would break the memory budget; nothing was allocated for it yet.

    Args:
        purpose: Purpose of the memory, as in "reading layer 7".
        in_use_bytes: Anonymous memory of the process now, swapped pages included.
    """

    def __init__(self, purpose: str, *, needed_bytes: int, in_use_bytes: int, limit_bytes: int) -> None:
        self.purpose = purpose
        self.needed_bytes = needed_bytes
        self.in_use_bytes = in_use_bytes
        self.limit_bytes = limit_bytes
        total_bytes = in_use_bytes + needed_bytes
        super().__init__(
            f"{purpose} would break the memory budget",
            expected=f"at most {format_size(limit_bytes)}",
            found=(
                f"{format_size(in_use_bytes)} in use and {format_size(needed_bytes)} more needed: "
                f"{format_size(total_bytes - limit_bytes)} too much"
            ),
            next_step=(
                f"Allow {_round_size_up(total_bytes)} or more, or ask for less at a time: "
                "no prefetch, fewer or shorter prompts."
            ),
        )


def available_bytes(*, root: Path = Path("/")) -> int:
    """Return the bytes that this process can still take without swapping, within the machine and its cgroup.

    `root` is the folder that holds `proc` and `sys`; tests give another one.
    """
    available = psutil.virtual_memory().available
    headroom = cgroup_headroom_bytes(root=root)
    return available if headroom is None else min(available, headroom)


class MemoryBudget:
    """A limit on this process's anonymous memory, which is checked before memory is taken; any thread may ask.

    Memory that is reused needs no check: it is resident already.

    Args:
        limit_bytes: Limit on all anonymous memory of the process, imported modules and swapped pages included; None
            for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise ValueError(f"a memory budget must be positive, not {limit_bytes}")
        self.limit_bytes = limit_bytes

    @classmethod
    def unlimited(cls) -> MemoryBudget:
        """Return a budget without a limit."""
        return cls(None)

    @property
    def left_bytes(self) -> int | None:
        """Bytes that could be taken now; None without a limit."""
        if self.limit_bytes is None:
            return None
        return max(self.limit_bytes - _unreclaimable_bytes(), 0)

    def require(self, num_bytes: int, purpose: str) -> None:
        """Raise unless `num_bytes` more fit, for memory that is allocated and filled at once.

        The error's text begins with `purpose`, such as "reading layer 7".

        Raises:
            MemoryBudgetError: The bytes do not fit.
        """
        left_bytes = self.left_bytes
        if self.limit_bytes is None or left_bytes is None or num_bytes <= left_bytes:
            return
        # Garbage, and freed pages that the allocator keeps, still count as in use: give them back, then look again.
        give_back_freed_memory()
        in_use_bytes = _unreclaimable_bytes()
        if in_use_bytes + num_bytes > self.limit_bytes:
            raise MemoryBudgetError(
                purpose,
                needed_bytes=num_bytes,
                in_use_bytes=in_use_bytes,
                limit_bytes=self.limit_bytes,
            )


def _unreclaimable_bytes() -> int:
    """Return the bytes that stay in use until this process frees them, in memory or swapped out."""
    usage = MemoryUsage.on_host()
    return usage.anonymous_bytes + usage.swapped_bytes


def give_back_freed_memory() -> None:
    """Collect garbage, and return freed pages to the system."""
    gc.collect()
    give_back_freed_pages()


def give_back_freed_pages() -> None:
    """Return freed pages, which the allocator keeps, to the system; mostly in less than a millisecond."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        # Only glibc has malloc_trim.
        if trim is not None:
            trim(0)


def _round_size_up(num_bytes: int) -> str:
    """Return a size as an option takes it, rounded up to one decimal of its unit: `12.4GB`."""
    unit_bytes = 1000 ** ((len(str(num_bytes)) - 1) // 3)
    step_bytes = max(unit_bytes // 10, 1)
    # Division rounded up.
    num_steps = -(-num_bytes // step_bytes)
    return format_size(num_steps * step_bytes).replace(" ", "")


def free_bytes(budget: MemoryBudget) -> int:
    """Return the memory to plan with: what the budget leaves; without a limit, a share of the machine's free memory."""
    left_bytes = budget.left_bytes
    return int(available_bytes() * _PLANNED_SHARE) if left_bytes is None else left_bytes
