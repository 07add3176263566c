"""The lock of a capture directory: a locked file that names the run that writes there."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from minimax_tools.errors import CaptureError

LOCK_NAME = ".lock"


@contextlib.contextmanager
def locked_directory(directory: Path, *, owner: str = "") -> Iterator[None]:
    """Make `directory` if it is missing, and keep other runs out of it in the block.

    Args:
        directory: The capture directory.
        owner: Name of the run, for processes that write along with it (see `read_owner`).

    Raises:
        CaptureError: Another run holds the lock, or the directory cannot be made or written to.
    """
    _make_folder(directory)
    path = directory / LOCK_NAME
    with contextlib.ExitStack() as stack:
        try:
            while True:
                file = stack.enter_context(path.open("a"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(file.fileno(), path):
                    _write_owner(file, owner)
                    break
                # The last owner removed the file between the two steps above: this lock protects nothing.
        except BlockingIOError:
            raise CaptureError(
                f"the output directory {directory} is in use by another run",
                next_step="Wait for it, or choose another --output-dir.",
            ) from None
        except OSError as error:
            raise CaptureError(
                f"cannot lock the capture directory {directory}",
                found=error.strerror,
                next_step="Choose another --output-dir.",
            ) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def read_owner(directory: Path) -> str | None:
    """Return the run that writes in `directory`, or a killed run that wrote there last; None without one."""
    try:
        return (directory / LOCK_NAME).read_text(encoding="utf-8")
    except OSError:
        return None


def _write_owner(file: TextIO, owner: str) -> None:
    # Written only now, with the lock held: opening the file changed nothing in it.
    file.truncate(0)
    file.write(owner)
    file.flush()
    os.fsync(file.fileno())


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _make_folder(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaptureError(
            f"cannot make the capture directory {directory}",
            found=error.strerror,
            next_step="Choose another --output-dir.",
        ) from error
