"""The lock of a capture directory: a locked file that names the run that writes there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from minimax_tools.errors import CaptureError
from minimax_tools.machine.durable import make_folder
from minimax_tools.machine.held_file import hold_file

LOCK_NAME = ".lock"


@contextlib.contextmanager
def locked_directory(directory: Path, *, owner: str = "") -> Iterator[None]:
    """Make `directory` if it is missing, and keep other runs out of it during the block.

    `owner` is the name of this run. Its other processes read it by `read_owner`.

    Raises:
        CaptureError: Another run holds the lock, or the directory cannot be made or written to.
    """
    _make_folder(directory)
    path = directory / LOCK_NAME
    with contextlib.ExitStack() as stack:
        try:
            _write_owner(stack.enter_context(hold_file(path)), owner)
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
    """Return the name of the run that holds the lock, or of a killed run that held it last; None without a lock."""
    try:
        return (directory / LOCK_NAME).read_text(encoding="utf-8")
    except OSError:
        return None


def _write_owner(file: TextIO, owner: str) -> None:
    # Only with the lock held: until then the file names the run that holds it.
    file.truncate(0)
    file.write(owner)
    file.flush()
    os.fsync(file.fileno())


def _make_folder(directory: Path) -> None:
    try:
        make_folder(directory)
    except OSError as error:
        raise CaptureError(
            f"cannot make the capture directory {directory}",
            found=error.strerror,
            next_step="Choose another --output-dir.",
        ) from error
