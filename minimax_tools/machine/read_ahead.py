"""Reading ahead: the system reads files into its page cache while the process does something else."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

# Bytes asked for at a time: systems cut off longer wishes, some of them at their disk's longest transfer.
_PIECE_BYTES = 1 << 19


def read_ahead(files: Sequence[Path]) -> None:
    """Ask the system to read files into its page cache, in order, on a thread that ends with the process.

    It is a wish: files that are missing are passed over, and a system without such wishes is left alone.
    """
    if hasattr(os, "posix_fadvise"):
        threading.Thread(target=_ask_for, args=(tuple(files),), name="mm2-read-ahead", daemon=True).start()


def _ask_for(files: Sequence[Path]) -> None:
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            for offset in range(0, os.fstat(descriptor).st_size, _PIECE_BYTES):
                # It waits where the disk's queue is full; so the thread is as fast as the disk.
                os.posix_fadvise(descriptor, offset, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            continue
        finally:
            os.close(descriptor)
