"""Files that are written whole or not at all: to a temporary sibling first, which is renamed at the end.

`whole_file` opens a text file. `whole_capture_file` yields a path, for safetensors too; it flushes the file to the
disk, and its errors are for the user.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

from minimax_tools.errors import CaptureError

# The disk, or a quota, is used up.
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Name of a temporary file of `whole_capture_file`. Earlier versions left out the random part.
_TEMPORARY = re.compile(r"\..+\.(safetensors|json)(\.[0-9a-f]{8})?\.tmp")


@contextmanager
def whole_file(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open a temporary UTF-8 file for writing. Rename it to `path` once the block has ended well.

    Args:
        path: The file, in a folder that exists.
        newline: End of each line, as the parameter of that name of Python's `open`.

    Raises:
        OSError: The file cannot be written. A file that was at `path` before is still there.
    """
    # Threads of several processes may write the same file: each gets a temporary file of its own.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline=newline) as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_capture_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary sibling of a capture's file. Rename it to `path` once the block has ended well.

    Raises:
        CaptureError: The disk is full, or cannot be written to.
    """
    # The random part keeps this run's file apart from that of an older run that was not killed entirely.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        # safetensors makes files that only their owner may read, but captures travel between people.
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def remove_temporaries(directory: Path) -> None:
    """Remove the files in `directory` that a killed run was writing by `whole_capture_file`."""
    for path in directory.iterdir():
        if is_temporary(path):
            path.unlink()


def is_temporary(path: Path) -> bool:
    """Decide whether a file is a temporary file of `whole_capture_file`, such as a killed run leaves behind."""
    return _TEMPORARY.fullmatch(path.name) is not None


def _unwritable(path: Path, error: Exception) -> CaptureError:
    if _errno(error) not in _FULL:
        return CaptureError(
            f"cannot write {path}",
            found=str(error),
            next_step="Mend the disk or its permissions, or choose another --output-dir.",
        )
    free = shutil.disk_usage(path.parent).free
    return CaptureError(
        f"no space left to write {path}",
        found=f"{free / 1e6:.1f} MB free",
        next_step="Free some space and run the same command again: it resumes after what is stored. "
        "Or choose another --output-dir. A capture takes less with --sites layer or --noise-floor stats.",
    )


def _errno(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors gives the number in its text only.
    number = re.search(r"\(os error (\d+)\)", str(error))
    return int(number[1]) if number else None
