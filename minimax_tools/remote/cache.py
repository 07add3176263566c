"""RemoteCache: the folder on this machine that keeps what was fetched from remote addresses.

    <cache>/captures/NAME-DIGEST/    a capture, its files fetched when they are read (`capture.mirror`)
    <cache>/models/NAME-DIGEST/      a checkpoint, its shards fetched when they are needed
    <cache>/outputs/NAME-DIGEST/     a run that is written here, and put at its address once it is whole
    <cache>/addresses/DIGEST.json    the capture that an address named last

Several processes may use it at once: a file is fetched under a lock, and renamed into place when it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import RemoteError
from minimax_tools.machine.size import format_size
from minimax_tools.remote.address import RemoteAddress

CACHE_VARIABLE = "MM2_CACHE"
CAPTURES, MODELS, OUTPUTS, ADDRESSES = "captures", "models", "outputs", "addresses"
_DEFAULT = Path("~/.cache/mm2")
_NUM_DIGITS = 16
# Left free on the disk when a file is fetched.
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedFolder:
    """A folder of the cache, and its size."""

    path: Path
    kind: str  # `captures`, `models` or `outputs`
    size_bytes: int  # links to another cache's files do not count


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
        name = (address.path or address.repository).rpartition("/")[2]
        clean = re.sub(r"[^A-Za-z0-9._-]", "_", name)
        return self.folder / kind / f"{clean}-{_digest(version)}"

    def address_file(self, address: RemoteAddress) -> Path:
        """Return the file that keeps what an address named last."""
        return self.folder / ADDRESSES / f"{_digest(str(address))}.json"

    def list(self) -> tuple[CachedFolder, ...]:
        """List the folders of the cache, sorted by path."""
        return tuple(
            CachedFolder(path=path, kind=kind, size_bytes=_size(path))
            for kind in (CAPTURES, MODELS, OUTPUTS)
            for path in sorted((self.folder / kind).glob("*"))
            if path.is_dir()
        )

    def clear(self) -> None:
        """Remove everything that the cache holds; files of other programs beside it stay."""
        for kind in (ADDRESSES, CAPTURES, MODELS, OUTPUTS):
            shutil.rmtree(self.folder / kind, ignore_errors=True)


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold the lock of `path` during the block: other processes and threads wait. The lock file stays."""
    lock = path.with_name(f".{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_room(folder: Path, size_bytes: int, *, what: str) -> None:
    """Check that the disk of an existing folder takes `size_bytes` more.

    Raises:
        RemoteError: It does not.
    """
    free_bytes = shutil.disk_usage(folder).free
    if size_bytes + _SPARE_BYTES > free_bytes:
        raise RemoteError(
            f"the disk at {folder} is too small for {what}",
            expected=format_size(size_bytes),
            found=f"{format_size(free_bytes)} free",
            next_step=f"Clear the cache with mm2-split cache --clear, or set {CACHE_VARIABLE} to a larger disk.",
            commands=("mm2-split cache",),
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_NUM_DIGITS]


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
