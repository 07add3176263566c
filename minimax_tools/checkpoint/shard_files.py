"""Bytes of a checkpoint's files, read through the system's page cache or past it.

The page cache pays for bytes that are read again soon. A layer of a streamed model is read once. To put it into the
cache takes more processor time than to read it, on a virtual machine several times as much. Such reads go from the
disk straight to this process (O_DIRECT), except for bytes that the cache holds already.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

# Alignment of direct reads: hardly any disk or file system asks for more than a page.
_ALIGNMENT = 4096
# Size of a direct read: large enough for the disk, and still in the processor's cache when it is copied.
_PIECE_BYTES = 1 << 20
# Range for which one probe of the page cache decides.
_EXTENT_BYTES = 16 << 20
# Errors of a file system or kernel that lacks direct reads or probes.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class ShardFiles:
    """Files that are opened at their first read and stay open until `close`; safe for several threads."""

    def __init__(self) -> None:
        self._descriptors: dict[tuple[Callable[[Path], int | None], Path], int | None] = {}
        self._lock = threading.Lock()
        self._buffers = threading.local()

    def read_into(self, path: Path, offset: int, out: torch.Tensor, *, past_cache: bool) -> int:
        """Fill `out` from an offset on; return the number of bytes before the file ended.

        Args:
            path: The file.
            offset: Offset of the first byte.
            out: uint8 [N], contiguous, on the CPU.
            past_cache: Add nothing to the page cache, if the system can.

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
        """Close every file; further reads open them again."""
        with self._lock:
            for descriptor in self._descriptors.values():
                if descriptor is not None:
                    os.close(descriptor)
            self._descriptors.clear()

    def _open(self, way: Callable[[Path], int | None], path: Path) -> int | None:
        """Return a descriptor, opened once by `way`; None if the file system cannot."""
        with self._lock:
            if (way, path) not in self._descriptors:
                self._descriptors[way, path] = way(path)
            return self._descriptors[way, path]

    def _read_through(self, path: Path, offset: int, out: torch.Tensor) -> int:
        descriptor = self._open(_open_through, path)
        assert descriptor is not None, "every file can be read through the cache"
        return _read(descriptor, offset, out)

    def _read_past(self, path: Path, offset: int, out: torch.Tensor) -> int:
        """Read some bytes of an extent; return their number, 0 at the file's end."""
        probe, direct = self._open(_open_probe, path), self._open(_open_direct, path)
        assert probe is not None, "every file can be probed"
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
        buffer, skip = self._aligned_buffer(), offset % _ALIGNMENT
        num_aligned = -(-(skip + len(out)) // _ALIGNMENT) * _ALIGNMENT
        count = _read(direct, offset - skip, buffer[:num_aligned])
        count = min(max(count - skip, 0), len(out))
        out[:count].copy_(buffer[skip : skip + count])
        return count

    def _aligned_buffer(self) -> torch.Tensor:
        """Return this thread's memory for direct reads, aligned to a page."""
        buffer: torch.Tensor | None = getattr(self._buffers, "aligned", None)
        if buffer is None:
            memory = torch.empty(_PIECE_BYTES + 2 * _ALIGNMENT, dtype=torch.uint8)
            buffer = memory[-memory.data_ptr() % _ALIGNMENT :][: _PIECE_BYTES + _ALIGNMENT]
            self._buffers.aligned = buffer
        return buffer


def is_cached(probe: int, start: int, stop: int) -> bool:
    """Decide whether the middle of a file's range is in the page cache; then most likely all of it is.

    Both ends are useless as a probe: reads of neighbours bring their pages. A probe of an uncached byte fetches its
    page. If the disk answers first (one time in hundreds), the range passes for cached.
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
    # Some systems lack the flag, and some file systems refuse it.
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
    # A probe of an uncached byte fetches its page; without this the system would fetch neighbours too.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(probe, 0, 0, os.POSIX_FADV_RANDOM)
    return probe


def _read(descriptor: int, offset: int, out: torch.Tensor) -> int:
    return os.preadv(descriptor, [out.numpy().data], offset)
