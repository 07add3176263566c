"""Memory limits of a container: Linux's cgroups, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """File names of limits and usage in one version of cgroups."""

    folder: str
    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


_V1 = _Version(
    folder="sys/fs/cgroup/memory",
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    cached=("total_active_file", "total_inactive_file"),
)
_V2 = _Version(
    folder="sys/fs/cgroup",
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    cached=("active_file", "inactive_file"),
)


def cgroup_headroom_bytes(*, root: Path = Path("/")) -> int | None:
    """Return the bytes that this process's cgroup and its parents still allow; None without a limit.

    The page cache counts as free: the kernel drops it before it refuses memory.

    Args:
        root: Folder of `proc` and `sys`.
    """
    headrooms = [
        headroom
        for version, group in _memory_groups(root)
        for folder in _upward(root / version.folder, group)
        if (headroom := _headroom(folder, version)) is not None
    ]
    return min(headrooms, default=None)


def _memory_groups(root: Path) -> Iterator[tuple[_Version, str]]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _V1, group
        elif not controllers:
            yield _V2, group


def _upward(mount: Path, group: str) -> Iterator[Path]:
    """Yield the group's folder and its parents up to the mount. In a container only the mount may exist."""
    folder = mount / group.strip("/")
    yield folder
    while folder != mount:
        folder = folder.parent
        yield folder


def _headroom(folder: Path, version: _Version) -> int | None:
    limits = [limit for name in version.limits if (limit := _read_number(folder / name)) is not None]
    used = _read_number(folder / version.usage)
    if not limits or used is None:
        return None
    return max(min(limits) - used + _cached_bytes(folder, version), 0)


def _cached_bytes(folder: Path, version: _Version) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = dict(line.split() for line in lines)
    return sum(int(found.get(name, 0)) for name in version.cached)


def _read_number(path: Path) -> int | None:
    """Read a number of bytes; None if the file is missing or says `max`."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
