"""Memory limits of a container: Linux's cgroups, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _CgroupVersion:
    """The files in which one version of cgroups states limits and usage.

    Args:
        mount: Folder below which every group has its own folder.
        limit_files: Files of the limits; the lowest limit holds.
        usage_file: File of the bytes in use, page cache included.
        cache_keys: Keys of the page cache in the file `memory.stat`.
    """

    mount: str
    limit_files: tuple[str, ...]
    usage_file: str
    cache_keys: tuple[str, ...]


_V1 = _CgroupVersion(
    mount="sys/fs/cgroup/memory",
    limit_files=("memory.limit_in_bytes",),
    usage_file="memory.usage_in_bytes",
    cache_keys=("total_active_file", "total_inactive_file"),
)
_V2 = _CgroupVersion(
    mount="sys/fs/cgroup",
    limit_files=("memory.max", "memory.high"),
    usage_file="memory.current",
    cache_keys=("active_file", "inactive_file"),
)


def cgroup_headroom_bytes(*, root: Path = Path("/")) -> int | None:
    """Return the bytes that this process's cgroup and its parents still allow; None without a limit.

    The page cache counts as free: the kernel drops it before it refuses memory.

    Args:
        root: Folder of `proc` and `sys`.
    """
    headrooms = []
    for version, group in _memory_groups(root):
        for folder in _group_and_parents(root / version.mount, group):
            headrooms.append(_headroom(folder, version))
    return min((headroom for headroom in headrooms if headroom is not None), default=None)


def _memory_groups(root: Path) -> Iterator[tuple[_CgroupVersion, str]]:
    """Yield the cgroups that limit this process's memory: the version and the group's path."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        # No Linux, or no cgroups: there is no limit.
        return
    for line in lines:
        # A line is `id:controllers:path`; version 2 names no controllers.
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _V1, group
        elif not controllers:
            yield _V2, group


def _group_and_parents(mount: Path, group: str) -> Iterator[Path]:
    """Yield the folders of the group and its parents, up to the mount. In a container only the mount may exist."""
    folder = mount / group.strip("/")
    yield folder
    while folder != mount:
        folder = folder.parent
        yield folder


def _headroom(folder: Path, version: _CgroupVersion) -> int | None:
    """Return the bytes that one group still allows; None if it sets no limit."""
    numbers = [_read_number(folder / name) for name in version.limit_files]
    limits = [number for number in numbers if number is not None]
    used = _read_number(folder / version.usage_file)
    if not limits or used is None:
        return None
    return max(min(limits) - used + _cached_bytes(folder, version), 0)


def _cached_bytes(folder: Path, version: _CgroupVersion) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counters = dict(line.split() for line in lines)
    return sum(int(counters.get(key, 0)) for key in version.cache_keys)


def _read_number(path: Path) -> int | None:
    """Read a number of bytes; None if the file is missing or says `max`."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
