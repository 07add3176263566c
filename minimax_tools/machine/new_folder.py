"""Folders that are written whole or not at all: to a temporary sibling first, which is renamed at the end."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minimax_tools.errors import CheckpointError, UsageError

# The disk, a quota or a limit on the file size is used up.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def new_folder(output: Path, *, size_bytes: int, remedy: str) -> Iterator[Path]:
    """Yield an empty temporary folder. Rename it to `output` if the block succeeds, else remove it.

    The temporary folder is called `.NAME.partial-…`. Those of killed processes are removed first.

    Args:
        output: A folder that is absent or empty.
        size_bytes: Bytes that will be written to it.
        remedy: Next step of the error if the disk is too small.

    Raises:
        UsageError: `output` is not empty.
        CheckpointError: The disk is too small, the folder cannot be written, or a file that the block reads cannot be
            read.
    """
    # If `output` is a link to an empty folder, that folder is replaced.
    output = output.resolve()
    refuse_occupied(output)
    partial = output.with_name(f".{output.name}.partial-{uuid.uuid4().hex[:8]}")
    try:
        _remove_abandoned(output)
        if _free_bytes(output) < size_bytes:
            raise _no_room(output, size_bytes, reason="", remedy=remedy)
        partial.mkdir(parents=True)
        with locked_folder(partial):
            yield partial
            partial.replace(output)
        sync_path(output.parent)
    except OSError as error:
        if error.errno in _FULL:
            raise _no_room(output, size_bytes, reason=f", {error}", remedy=remedy) from error
        if _is_elsewhere(error, output):
            raise CheckpointError(
                f"{error.filename} cannot be read",
                found=error.strerror,
                next_step="Check that the file exists and that you may read it.",
            ) from error
        raise CheckpointError(
            f"{output} cannot be written", found=str(error), next_step="Name another --output."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_occupied(output: Path) -> None:
    """Raise unless `output` is absent or an empty folder.

    Raises:
        UsageError: Something is there.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(
            f"{output} exists",
            expected="a new or empty folder",
            next_step="Name another folder, or remove it.",
        )


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


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder during the block. The system releases the lock even if this process is killed.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(output: Path) -> None:
    for partial in output.parent.glob(f".{glob.escape(output.name)}.partial-*"):
        try:
            with locked_folder(partial):
                shutil.rmtree(partial)
        except OSError:
            # Another process is still writing this folder, or removes it right now. Either way it can stay.
            continue


def _free_bytes(output: Path) -> int:
    existing_parent = next(parent for parent in output.parents if parent.exists())
    return shutil.disk_usage(existing_parent).free


def _is_elsewhere(error: OSError, output: Path) -> bool:
    """Decide whether an error concerns a file that is neither `output`, nor beside it, nor below it."""
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str)]
    return bool(names) and all(output.parent not in Path(name).absolute().parents for name in names)


def _no_room(output: Path, size_bytes: int, *, reason: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        f"{output} cannot be written",
        expected=f"{size_bytes} bytes",
        found=f"{_free_bytes(output)} bytes free{reason}",
        next_step=remedy,
    )
