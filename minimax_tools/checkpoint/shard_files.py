"""ShardFiles: the bytes of a checkpoint's files, through the system's page cache or past it.

The page cache pays for bytes that are read again soon. A layer of a streamed model is read once, and filling the
cache with it takes more processor time than reading it: several times as much on a virtual machine, from the cores
that have the arithmetic to do. Such reads go from the disk straight to this process (O_DIRECT), except for what the
cache holds already.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType

import torch

# What direct reads must be aligned to: hardly a disk or file system asks for more than a page.
_ALIGNMENT = 4096
# So much past the cache at once: large enough for the disk, and still in the processor's cache when it is copied.
_PIECE_BYTES = 1 << 20
# For so much the page cache is asked at once whether it has it.
_EXTENT_BYTES = 16 << 20
# What a file system or kernel says that cannot do what is asked for here.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class _Way(Enum):
    """How a file is opened."""

    THROUGH = "to be read through the page cache"
    DIRECT = "to be read past it"
    PROBE = "to be asked what of it is cached, and read where it is"


class ShardFiles:
    """Files that are opened when they are first read, and stay open until `close`; safe for several threads."""

    def __init__(self) -> None:
        self._descriptors: dict[tuple[_Way, Path], int | None] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def read_into(self, path: Path, offset: int, out: torch.Tensor, *, past_cache: bool) -> int:
        """Fill `out` from an offset on; gives how many bytes there were before the file ended.

        Args:
            path: The file.
            offset: Of the first byte.
            out: uint8 [N], contiguous, on the CPU.
            past_cache: Whether what the page cache lacks is read without being put there, where the system can.

        Raises:
            OSError: The file cannot be opened or read.
        """
        position = 0
        while position < len(out):
            extent = out[position : position + _EXTENT_BYTES] if past_cache else out[position:]
            count = (self._read_past if past_cache else self._read_through)(path, offset + position, extent)
            if count == 0:
                break
            position += count
        return position

    def close(self) -> None:
        """Close every file; reading again opens it anew."""
        with self._lock:
            for descriptor in self._descriptors.values():
                if descriptor is not None:
                    os.close(descriptor)
            self._descriptors.clear()

    def _open(self, way: _Way, path: Path) -> int | None:
        """A descriptor for the way, opened once; None where the file system does not have it."""
        with self._lock:
            if (way, path) not in self._descriptors:
                self._descriptors[way, path] = _OPENERS[way](path)
            return self._descriptors[way, path]

    def _read_through(self, path: Path, offset: int, out: torch.Tensor) -> int:
        descriptor = self._open(_Way.THROUGH, path)
        assert descriptor is not None, "every file can be read through the cache"
        return _read(descriptor, offset, out)

    def _read_past(self, path: Path, offset: int, out: torch.Tensor) -> int:
        """Read some of an extent; gives how much, 0 at the file's end."""
        probe, direct = self._open(_Way.PROBE, path), self._open(_Way.DIRECT, path)
        assert probe is not None, "every file can be asked for"
        if is_cached(probe, offset, offset + len(out)):
            return _read(probe, offset, out)
        if direct is None:
            return self._read_through(path, offset, out)
        position = 0
        while position < len(out):
            piece, place = out[position : position + _PIECE_BYTES], offset + position
            try:
                count = self._read_direct(direct, place, piece)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                count = self._read_through(path, place, piece)
            if count == 0:
                break
            position += count
        return position

    def _read_direct(self, direct: int, offset: int, out: torch.Tensor) -> int:
        bounce, skip = self._bounce(), offset % _ALIGNMENT
        num_aligned = -(-(skip + len(out)) // _ALIGNMENT) * _ALIGNMENT
        count = _read(direct, offset - skip, bounce[:num_aligned])
        count = min(max(count - skip, 0), len(out))
        out[:count].copy_(bounce[skip : skip + count])
        return count

    def _bounce(self) -> torch.Tensor:
        """This thread's memory for direct reads, aligned as they must be."""
        bounce: torch.Tensor | None = getattr(self._own, "bounce", None)
        if bounce is None:
            memory = torch.empty(_PIECE_BYTES + 2 * _ALIGNMENT, dtype=torch.uint8)
            bounce = self._own.bounce = memory[-memory.data_ptr() % _ALIGNMENT :][: _PIECE_BYTES + _ALIGNMENT]
        return bounce


def is_cached(probe: int, start: int, stop: int) -> bool:
    """Whether the middle of a file's range is in the page cache; then most likely all of it is.

    Its ends say nothing: whoever read a neighbour has brought their pages. To ask for a byte that is not there fetches
    its page; where the disk is quicker than the answer (one time in hundreds), the range passes for cached.
    """
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return False
    try:
        return os.preadv(probe, [bytearray(1)], (start + stop) // 2, flag) == 1
    except OSError as error:
        if error.errno not in {errno.EAGAIN, *_UNSUPPORTED}:
            raise
        return False


def _open_through(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)


def _open_direct(path: Path) -> int | None:
    # Not every system knows the flag, and not every file system takes it.
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        return _open_through(path, flag)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return None


def _open_probe(path: Path) -> int:
    probe = _open_through(path)
    # A question for a byte that is not there fetches its page: let it be that page alone.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(probe, 0, 0, os.POSIX_FADV_RANDOM)
    return probe


_OPENERS: Mapping[_Way, Callable[[Path], int | None]] = MappingProxyType(
    {_Way.THROUGH: _open_through, _Way.DIRECT: _open_direct, _Way.PROBE: _open_probe}
)


def _read(descriptor: int, offset: int, out: torch.Tensor) -> int:
    return os.preadv(descriptor, [out.numpy().data], offset)
