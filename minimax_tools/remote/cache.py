"""RemoteCache: the folder on this machine that keeps what was fetched from remote addresses.

    <cache>/captures/NAME-ADDRESS-VERSION/  a capture, its files fetched when they are read (`capture.mirror`)
    <cache>/models/NAME-ADDRESS-VERSION/    a checkpoint, its shards fetched when they are needed

ADDRESS and VERSION are digests. Several processes may use the cache at once: a file is fetched under a lock, and
renamed into place when it is whole.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from minimax_tools.errors import RemoteError
from minimax_tools.machine.files import hold_file
from minimax_tools.machine.size import format_size
from minimax_tools.remote.address import RemoteAddress

CACHE_VARIABLE = "MM2_CACHE"
CAPTURES, MODELS = "captures", "models"
# In a folder of a capture: the address that it was fetched from.
ADDRESS_NAME = ".address.json"
_DEFAULT = Path("~/.cache/mm2")
# Left free on the disk when a file is fetched.
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedFolder:
    """A folder of the cache, and its size."""

    path: Path
    kind: str  # `captures` or `models`
    # Without links to another cache's files, and files that a folder that was used later shares by hard links.
    size_bytes: int
    used_at: str  # time of its last use in UTC, such as `2026-11-23T20:03:00+00:00`


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCache:
    """The cache of remote files."""

    folder: Path

    @classmethod
    def from_environment(cls) -> RemoteCache:
        """Return the cache in the folder that the variable MM2_CACHE names, or in `~/.cache/mm2`."""
        return cls(folder=Path(os.environ.get(CACHE_VARIABLE) or _DEFAULT).expanduser().absolute())

    def place(self, kind: str, address: RemoteAddress, version: str) -> Path:
        """Return the folder of one version of what is at an address."""
        return self.folder / kind / f"{_stem(address)}-{_digest(version)}"

    def versions(self, kind: str, address: RemoteAddress) -> tuple[Path, ...]:
        """Return the folders of all versions of what was at an address, the one that was used last first."""
        folders = (self.folder / kind).glob(f"{_stem(address)}-*")
        return tuple(sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True))

    def list(self) -> tuple[CachedFolder, ...]:
        """List the folders of the cache, those that were used last first."""
        found = [
            (_used_at(path), path, kind)
            for kind in (CAPTURES, MODELS)
            for path in (self.folder / kind).glob("*")
            if path.is_dir()
        ]
        counted: set[tuple[int, int]] = set()
        return tuple(
            CachedFolder(path=path, kind=kind, size_bytes=_size(path, counted), used_at=used_at)
            for used_at, path, kind in sorted(found, reverse=True)
        )

    def free(self, keep_bytes: int) -> tuple[CachedFolder, ...]:
        """Remove folders, those that were used least lately first, until the cache takes at most `keep_bytes`.

        Files of other programs stay. Return what was removed.
        """
        folders = self.list()
        held_bytes = sum(one.size_bytes for one in folders)
        removed = []
        for one in reversed(folders):
            if held_bytes > keep_bytes or keep_bytes == 0:
                shutil.rmtree(one.path, ignore_errors=True)
                held_bytes -= one.size_bytes
                removed.append(one)
        return tuple(removed)


def mark_used(folder: Path) -> None:
    """Note that a folder of the cache is used now; a cache that may only be read keeps no note."""
    with suppress(OSError):
        os.utime(folder)


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold the lock of `path` during the block: other processes and threads wait. The lock file stays.

    Raises:
        RemoteError: The cache cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = hold_file(path.with_name(f".{path.name}.lock"), waits=True)
    except OSError as error:
        raise RemoteError(
            f"the cache at {path.parent} cannot be written to",
            found=error.strerror,
            next_step=f"Mend its permissions, or set {CACHE_VARIABLE} to another folder.",
        ) from error
    with file:
        yield


def check_room(folder: Path, size_bytes: int, *, what: str) -> None:
    """Raise RemoteError unless the disk of an existing folder takes `size_bytes` more."""
    free_bytes = shutil.disk_usage(folder).free
    if size_bytes + _SPARE_BYTES > free_bytes:
        raise RemoteError(
            f"the disk at {folder} is too small for {what}",
            expected=f"{format_size(size_bytes)}, and {format_size(_SPARE_BYTES)} to spare",
            found=f"{format_size(free_bytes)} free",
            next_step=f"Free space with mm2-split cache --keep SIZE, or set {CACHE_VARIABLE} to a larger disk.",
            commands=("mm2-split cache",),
        )


def _stem(address: RemoteAddress) -> str:
    name = (address.path or address.repository).rpartition("/")[2]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{_digest(str(address))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _used_at(folder: Path) -> str:
    return datetime.fromtimestamp(int(folder.stat().st_mtime), tz=timezone.utc).isoformat()


def _size(folder: Path, counted: set[tuple[int, int]]) -> int:
    """Return the bytes of a folder's files, without those in `counted`; add its files to them."""
    size_bytes = 0
    for path in folder.rglob("*"):
        status = path.lstat()
        file = (status.st_dev, status.st_ino)
        if stat.S_ISREG(status.st_mode) and file not in counted:
            counted.add(file)
            size_bytes += status.st_size
    return size_bytes
