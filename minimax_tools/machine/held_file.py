"""Held files and folders: locked by a living process. The system lets them go when it ends, even if killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def hold_file(path: Path) -> TextIO:
    """Make a file if it is missing, and lock it until the returned file is closed.

    Raises:
        BlockingIOError: Another process, or another call in this one, holds it.
        OSError: It cannot be made, or its file system knows no locks.
    """
    while True:
        file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder may have removed the file between `open` and `flock`: its lock protects nothing.
            if _is_same_file(file.fileno(), path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder itself during the block.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
