"""The page cache: what the system keeps of files in memory, and files put into it or dropped from it."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

_PIECE_BYTES = 8 << 20
# Of a checkpoint's bytes, what may come from the disk when it is warm, and must when it is cold.
_WARM_SHARE, _COLD_SHARE = 0.02, 0.98


class CacheState(Enum):
    """What the page cache holds of a checkpoint when a probe begins."""

    ANY = "as it was"
    WARM = "warm"
    COLD = "cold"

    def prepare(self, files: tuple[Path, ...]) -> None:
        """Read the files, or drop them."""
        if self is CacheState.WARM:
            warm_cache(files)
        if self is CacheState.COLD:
            drop_cache(files)

    def fits(self, disk_share: float) -> bool:
        """Whether a probe that read so much of a checkpoint from the disk found what it should."""
        if self is CacheState.ANY:
            return True
        return disk_share <= _WARM_SHARE if self is CacheState.WARM else disk_share >= _COLD_SHARE


def warm_cache(files: tuple[Path, ...]) -> None:
    """Read files into the page cache."""
    buffer = bytearray(_PIECE_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_cache(files: tuple[Path, ...]) -> None:
    """Drop files from the page cache; a host's cache below a virtual machine's disk is out of reach."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
