"""Layers fetched from the disk into the system's page cache before they are needed.

Any reader then finds them in memory, in whatever order a port asks for tensors. The process itself holds nothing: the
system drops pages when it needs room.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

from minimax_tools.checkpoint.byte_ranges import join_ranges
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.shard_files import is_cached

logger = logging.getLogger(__name__)

# Bytes between two looks at whether to stop; also all the memory that this takes.
_PIECE_BYTES = 4 << 20


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
        buffer = memoryview(bytearray(_PIECE_BYTES))
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
