"""Files that are written whole or not at all: in a temporary folder beside them first, and renamed at the end.

| function | gives | its errors |
|---|---|---|
| `whole_path` | a path, for libraries that write files themselves | OSError |
| `whole_file` | a text file | OSError |
| `whole_capture_file` | a path, for files of a capture | for the user |

A file is on the disk before it gets its name. What killed writers of it left behind is removed first.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

from minimax_tools.errors import CaptureError
from minimax_tools.machine.durable import put_in_place, sync_path
from minimax_tools.machine.temporary import is_temporary_folder, remove_abandoned, temporary_beside

# The disk, or a quota, is used up.
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Names of the temporary files of earlier versions, and of those that safetensors put beside them.
_EARLIER = re.compile(r"\..+\.(safetensors|json)(\.[0-9a-f]{8})?\.tmp|\.tmp[A-Za-z0-9]{6}")


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file. Rename it to `path` once the block has ended well.

    Raises:
        OSError: The file cannot be written. A file that was at `path` before is still there.
    """
    with temporary_beside(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        # safetensors makes files that only their owner may read, but captures travel between people.
        temporary.chmod(mode)
        sync_path(temporary)
        put_in_place(temporary, path)


@contextmanager
def whole_file(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open a temporary UTF-8 file for writing. Rename it to `path` once the block has ended well.

    Args:
        path: The file, in a folder that exists.
        newline: End of each line, as the parameter of that name of Python's `open`.

    Raises:
        OSError: The file cannot be written. A file that was at `path` before is still there.
    """
    with whole_path(path) as temporary, temporary.open("w", encoding="utf-8", newline=newline) as file:
        yield file


@contextmanager
def whole_capture_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty temporary file for a capture's file. Rename it once the block has ended well.

    Raises:
        CaptureError: The disk is full, or cannot be written to.
    """
    try:
        with whole_path(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise _unwritable(path, error) from error


def remove_temporaries(directory: Path) -> None:
    """Remove what killed runs, of earlier versions too, were writing in a directory; what is being written stays.

    Only the holder of the directory's lock may call it.
    """
    remove_abandoned(directory)
    for path in directory.iterdir():
        if _EARLIER.fullmatch(path.name) and path.is_file():
            path.unlink()


def is_temporary(path: Path) -> bool:
    """Decide whether a path has a name of what a killed run leaves behind."""
    return is_temporary_folder(path) or _EARLIER.fullmatch(path.name) is not None


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
