"""The lock of a capture directory: a file that is there, and locked, while a run writes, and says which run."""

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
    """Make `directory` where it is missing and keep every other run out of it while the block lasts.

    Args:
        directory: The capture directory.
        owner: What names the run to processes that write along with it (see `read_owner`).

    Raises:
        CaptureError: Another run is in it, or it cannot be made or written to.
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
                # Its last owner removed it between the two steps above: the lock holds nobody off.
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
    """Return the run that writes in `directory`, or the killed one that wrote there last; None without a trace."""
    try:
        return (directory / LOCK_NAME).read_text(encoding="utf-8")
    except OSError:
        return None


def _write_owner(file: TextIO, owner: str) -> None:
    # Only who holds the lock may say so: the file was opened without a change to it.
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
