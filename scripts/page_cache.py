"""The system's page cache: files are read into it, or dropped from it."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

_PIECE_BYTES = 8 << 20
# Largest share of a checkpoint that comes from the disk if the cache was warm, and smallest if it was cold.
_WARM_SHARE, _COLD_SHARE = 0.02, 0.98


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

    def fits(self, disk_share: float) -> bool:
        """Decide whether a probe, which read this share of the checkpoint from the disk, began in this state."""
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
    """Drop files from the page cache; the cache of a virtual machine's host is out of reach."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            # Only pages that are on the disk can be dropped.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
