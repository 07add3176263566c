"""Bytes of a checkpoint's files, read through the system's page cache or past it; and layers read ahead into it.

A layer of a streamed model is read once. To put it into the page cache takes more processor time than to read it. Such
reads go from the disk straight to this process (O_DIRECT), except for small ones, and for bytes that the cache holds
already. O_DIRECT reads whole pages to whole pages: memory that lies in its page as the bytes lie in the file's is
filled without a copy, but for the pages at its ends.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from minimax_tools.checkpoint.header import join_ranges
from minimax_tools.checkpoint.index import TensorIndex

logger = logging.getLogger(__name__)


# Alignment of direct reads: hardly any disk or file system asks for more than a page.
ALIGNMENT = 4096
# Bytes of a direct read that are copied: large enough for the disk, and still in the processor's cache then.
_PIECE_BYTES = 1 << 20
# Reads up to this size go through the page cache: small tensors, such as block scales, share its pages.
_SMALL_BYTES = 1 << 16
# Bytes for which one probe of the page cache decides: more make fewer probes, and a wrong one costs more.
_EXTENT_BYTES = 16 << 20
# Errors of a file system or kernel that lacks direct reads or probes.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})

# Opens a file in one of three ways (see the end of this file); None if the file system does not support it.
_Opener = Callable[[Path], int | None]


class ShardFiles:
    """Files that are opened at their first read and stay open until `close`; safe for several threads."""

    def __init__(self) -> None:
        self._descriptors: dict[tuple[_Opener, Path], int | None] = {}
        self._lock = threading.Lock()
        self._buffers = threading.local()

    def read_into(self, path: Path, offset: int, out: torch.Tensor, *, past_cache: bool) -> int:
        """Fill `out`, contiguous uint8 [N] on the CPU, from byte `offset` on; return the number of bytes read.

        It is less than N if the file ends; the rest of `out` is undefined then. With `past_cache`, only small reads
        add to the page cache, if the system can avoid it.

        Raises:
            OSError: The file cannot be opened or read.
        """
        position = 0
        while position < len(out):
            if past_cache:
                extent = out[position : position + _EXTENT_BYTES]
                count = self._read_past_cache(path, offset + position, extent)
            else:
                count = self._read_through_cache(path, offset + position, out[position:])
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

    def _descriptor(self, opener: _Opener, path: Path) -> int | None:
        """Return the file's descriptor of this kind, opened at the first call."""
        with self._lock:
            if (opener, path) not in self._descriptors:
                self._descriptors[opener, path] = opener(path)
            return self._descriptors[opener, path]

    def _read_through_cache(self, path: Path, offset: int, out: torch.Tensor) -> int:
        descriptor = self._descriptor(_open_plain, path)
        assert descriptor is not None, "every file can be read through the cache"
        return _read(descriptor, offset, out)

    def _read_past_cache(self, path: Path, offset: int, out: torch.Tensor) -> int:
        """Read some bytes of an extent; return their number, 0 at the file's end."""
        probe, direct = self._descriptor(_open_probe, path), self._descriptor(_open_direct, path)
        assert probe is not None, "every file can be probed"
        if len(out) <= _SMALL_BYTES or is_cached(probe, offset, offset + len(out)):
            return _read(probe, offset, out)
        if direct is None:
            return self._read_through_cache(path, offset, out)
        position = 0
        while position < len(out):
            rest, rest_offset = out[position:], offset + position
            try:
                count = self._read_direct(direct, rest_offset, rest)
            except OSError as error:
                # Some file systems accept O_DIRECT when a file is opened, and refuse the read.
                if error.errno not in _UNSUPPORTED:
                    raise
                count = self._read_through_cache(path, rest_offset, rest[:_PIECE_BYTES])
            if count == 0:
                break
            position += count
        return position

    def _read_direct(self, direct: int, offset: int, out: torch.Tensor) -> int:
        """Read some of the bytes, straight into whole pages of `out` and else by a copy; return their number."""
        before = -offset % ALIGNMENT  # bytes before the first whole page
        num_whole = (len(out) - before) // ALIGNMENT * ALIGNMENT
        if (out.data_ptr() - offset) % ALIGNMENT or num_whole <= 0:
            return self._read_copied(direct, offset, out[:_PIECE_BYTES])
        return self._read_scattered(direct, offset, *out.tensor_split((before, before + num_whole)))

    def _read_scattered(
        self, direct: int, offset: int, head: torch.Tensor, whole: torch.Tensor, tail: torch.Tensor
    ) -> int:
        """Read in one call the end of a page, whole pages, and the start of a page; return the number of bytes.

        The pages of `head` and `tail` hold other bytes too: they go to the aligned buffer, and are copied. Both may be
        empty.
        """
        head_page, tail_page, _ = self._aligned_buffer().tensor_split((ALIGNMENT, 2 * ALIGNMENT))
        skip = ALIGNMENT - len(head) if len(head) else 0  # bytes of the first page before those asked for
        pages = [head_page] * bool(len(head)) + [whole] + [tail_page] * bool(len(tail))
        count = max(os.preadv(direct, [page.numpy().data for page in pages], offset - skip) - skip, 0)
        num_head = min(count, len(head))
        head[:num_head].copy_(head_page[skip : skip + num_head])
        num_tail = min(max(count - len(head) - len(whole), 0), len(tail))
        tail[:num_tail].copy_(tail_page[:num_tail])
        return min(count, len(head) + len(whole) + len(tail))

    def _read_copied(self, direct: int, offset: int, out: torch.Tensor) -> int:
        """Read whole pages into the aligned buffer, as O_DIRECT demands, and copy the bytes asked for."""
        # `skip` bytes of the first page lie before the bytes asked for.
        buffer, skip = self._aligned_buffer(), offset % ALIGNMENT
        num_pages = math.ceil((skip + len(out)) / ALIGNMENT)
        count = _read(direct, offset - skip, buffer[: num_pages * ALIGNMENT])
        # The last page may hold more than was asked for, and the file may end in any page.
        count = min(max(count - skip, 0), len(out))
        out[:count].copy_(buffer[skip : skip + count])
        return count

    def _aligned_buffer(self) -> torch.Tensor:
        """Return this thread's memory for direct reads, aligned to a page: a piece, and a page because of `skip`."""
        buffer: torch.Tensor | None = getattr(self._buffers, "aligned", None)
        if buffer is None:
            memory = torch.empty(_PIECE_BYTES + 2 * ALIGNMENT, dtype=torch.uint8)
            first_page = -memory.data_ptr() % ALIGNMENT  # the bytes that the address lacks to a page
            buffer = memory[first_page : first_page + _PIECE_BYTES + ALIGNMENT]
            self._buffers.aligned = buffer
        return buffer


def is_cached(probe: int, start: int, stop: int) -> bool:
    """Decide whether bytes `start` to `stop` are most likely in the page cache, because the middle one is.

    `probe` is the open file's descriptor. Neither end tells, because reads of neighbours bring the pages at both ends.
    A look at an uncached byte fetches its page. If the disk answers first (one time in hundreds), the range passes for
    cached.
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


def _open_plain(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)


def _open_direct(path: Path) -> int | None:
    # Some systems lack the flag, and some file systems refuse it.
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return None
    try:
        return _open_plain(path, flag)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return None


def _open_probe(path: Path) -> int:
    probe = _open_plain(path)
    # Without this advice the system fetches the neighbours of a probed page too.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(probe, 0, 0, os.POSIX_FADV_RANDOM)
    return probe


def _read(descriptor: int, offset: int, out: torch.Tensor) -> int:
    return os.preadv(descriptor, [out.numpy().data], offset)


# Bytes between two looks at whether to stop; also all the memory that this takes.
_BUFFER_BYTES = 4 << 20


class ReadAhead:
    """Fetches requested layers one after the other, in one thread."""

    def __init__(self, index: TensorIndex) -> None:
        self._index = index
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mm2-read-ahead")
        self._requested: dict[int, Future[None]] = {}
        self._is_closed = threading.Event()

    def request(self, layer: int) -> Future[None]:
        """Begin to fetch a layer after the layers requested before, once per layer; return the job.

        The job ends when the system was asked for all of it; `close` cancels it. An unreadable file ends the job
        without an error: whoever reads the layer meets the error too.
        """
        if layer not in self._requested:
            logger.debug("Reading layer %d ahead.", layer)
            self._requested[layer] = self._thread.submit(self._fetch, layer)
        return self._requested[layer]

    def close(self) -> None:
        """Stop, even in the middle of a layer, and end the thread."""
        self._is_closed.set()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fetch(self, layer: int) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        try:
            entries = [self._index[name] for name in self._index.layer_names(layer)]
            for byte_range in join_ranges(sorted(entries, key=lambda entry: entry.position)):
                with byte_range.file.open("rb", buffering=0) as shard:
                    self._fetch_range(shard.fileno(), byte_range.start, byte_range.stop, buffer)
        except OSError as error:
            logger.debug("Layer %d is not read ahead: %s", layer, error)

    def _fetch_range(self, descriptor: int, start: int, stop: int, buffer: memoryview) -> None:
        while start < stop and not self._is_closed.is_set():
            piece = buffer[: stop - start]
            # Copying cached bytes would only cost time. The advice fetches them if they were not cached after all.
            if is_cached(descriptor, start, start + len(piece)):
                os.posix_fadvise(descriptor, start, len(piece), os.POSIX_FADV_WILLNEED)
                start += len(piece)
                continue
            count = os.preadv(descriptor, [piece], start)
            if count == 0:
                # The file ends early. Whoever reads the layer meets that as an error.
                return
            start += count


def stored_layer_bytes(index: TensorIndex, layer: int) -> int:
    """Return the size of a layer on the disk, block scales included."""
    return sum(index[name].size_bytes for name in index.layer_names(layer))
