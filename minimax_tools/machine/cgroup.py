"""Memory limits of a container: Linux's cgroups, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
