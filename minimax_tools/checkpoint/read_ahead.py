"""ReadAhead: layers' bytes fetched from the disk before they are asked for, into the system's page cache.

Who reads them then finds them in memory. This process holds nothing of them, so it works for every reader, also for
one whose own code asks for tensors in an order of its own; the system drops the pages where it needs the room.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.shard_files import is_cached

logger = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20


class ReadAhead:
    """Fetches the layers that are requested, one after the other, in a thread of its own.

    Args:
        index: Of the checkpoint.
    """

    def __init__(self, index: TensorIndex) -> None:
        self._index = index
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mm2-read-ahead")
        self._requested: dict[int, Future[None]] = {}
        self._is_closed = threading.Event()

    def request(self, layer: int) -> Future[None]:
        """Fetch a layer after those requested before, once; what is given back is done when it is fetched.

        A file that cannot be read ends the fetching without an error: whoever reads the layer meets it too, and
        knows what it means.
        """
        if layer not in self._requested:
            logger.debug("Reading layer %d ahead.", layer)
            self._requested[layer] = self._thread.submit(self._fetch, layer)
        return self._requested[layer]

    def close(self) -> None:
        """Stop in the middle of a layer, and end the thread."""
        self._is_closed.set()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fetch(self, layer: int) -> None:
        scratch = memoryview(bytearray(_PIECE_BYTES))
        try:
            for file, start, stop in _ranges(self._index, layer):
                with file.open("rb", buffering=0) as shard:
                    while start < stop and not self._is_closed.is_set():
                        piece = scratch[: stop - start]
                        # Copying what is there would only cost time. What is not, though it passes for it, the
                        # system fetches meanwhile.
                        if is_cached(shard.fileno(), start, start + len(piece)):
                            os.posix_fadvise(shard.fileno(), start, len(piece), os.POSIX_FADV_WILLNEED)
                            start += len(piece)
                            continue
                        count = os.preadv(shard.fileno(), [piece], start)
                        if count == 0:
                            break
                        start += count
        except OSError as error:
            logger.debug("Layer %d is not read ahead: %s", layer, error)


def stored_layer_bytes(index: TensorIndex, layer: int) -> int:
    """What a layer takes on the disk, block scales included."""
    return sum(index[name].size_bytes for name in index.layer_names(layer))


def _ranges(index: TensorIndex, layer: int) -> list[tuple[Path, int, int]]:
    """Return the file, start and stop of a layer's bytes, neighbours joined, from front to back."""
    ranges: list[tuple[Path, int, int]] = []
    for entry in sorted(map(index.__getitem__, index.layer_names(layer)), key=lambda entry: entry.position):
        start, stop = entry.offset, entry.offset + entry.size_bytes
        if ranges and ranges[-1][0] == entry.file and ranges[-1][2] == start:
            start = ranges.pop()[1]
        ranges.append((entry.file, start, stop))
    return ranges
