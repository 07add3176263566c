"""The system's page cache: files are read into it, or dropped from it."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

_PIECE_BYTES = 8 << 20
# Largest share of a checkpoint that comes from the disk if the cache was warm, and smallest if it was cold.
_WARM_SHARE, _COLD_SHARE = 0.02, 0.98
# Code of libraries that a probe may read from the disk besides: it leaves a busy machine's cache too. 18 MB were seen.
_LIBRARY_BYTES = 32_000_000


class CacheState(Enum):
    """State of a checkpoint in the page cache when a probe (one measurement) begins."""

    ANY = "as it was"
    WARM = "warm"
    COLD = "cold"

    def prepare(self, files: tuple[Path, ...]) -> None:
        """Bring the files into this state."""
        if self is CacheState.WARM:
            warm_cache(files)
        if self is CacheState.COLD:
            drop_cache(files)

    def fits(self, disk_bytes: int, stored_bytes: int) -> bool:
        """Decide whether a probe that read `disk_bytes` from the disk found files of `stored_bytes` in this state."""
        if self is CacheState.ANY:
            return True
        if self is CacheState.WARM:
            return disk_bytes <= _WARM_SHARE * stored_bytes + _LIBRARY_BYTES
        return disk_bytes >= _COLD_SHARE * stored_bytes


def warm_cache(files: tuple[Path, ...]) -> None:
    """Read files into the page cache."""
    buffer = bytearray(_PIECE_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_cache(files: tuple[Path, ...]) -> None:
    """Drop files from the page cache; the cache of a virtual machine's host is out of reach."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Only pages that are on the disk can be dropped.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
