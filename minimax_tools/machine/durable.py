"""Durable files and folders: what is renamed to its final name is on the disk, and stays after a power loss."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

# A file system or its permissions do not let a folder's entries be flushed: nothing more can be done.
_NOT_OFFERED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


def sync_path(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to the disk.

    Raises:
        OSError: They cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush all files and folders below a folder, and the folder itself.

    Raises:
        OSError: They cannot be written.
    """
    for path in (*folder.rglob("*"), folder):
        if path.is_dir() or path.is_file():
            sync_path(path)


def put_in_place(written: Path, path: Path) -> None:
    """Rename a written file or folder, which is on the disk, to `path`, and flush that name too.

    Raises:
        OSError: It cannot be renamed, or the name cannot be written.
    """
    written.replace(path)
    try:
        sync_path(path.parent)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and flush the names of those that are new.

    Raises:
        OSError: One cannot be made.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(new):
        with suppress(OSError):
            sync_path(path.parent)
