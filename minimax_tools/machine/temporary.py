"""Temporary folders: hidden folders beside what is being written, held by the process that writes.

    .NAME.1f0c44ab.tmp/.NAME.tmp    what is being written, a file or a folder; a search for files finds it by no pattern
    .NAME.1f0c44ab.tmp/.lock        locked by its writer

Libraries put temporary files of their own beside the file that they write: these lie in the folder too. A killed writer
leaves the folder behind without its lock, so whoever writes the same name next removes it. A lock tells more than a
process number in the name: it also holds between containers, on a shared file system and after a restart.
"""

from __future__ import annotations

import errno
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from minimax_tools.machine.held_file import hold_file

_LOCK_NAME = ".lock"
_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
# A file system that knows no locks. Nobody can tell there whether a writer lives, so nothing is removed.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
# Attempts to make a folder that nobody removes before it is locked.
_NUM_ATTEMPTS = 10


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a path in a new temporary folder beside `path`; nothing is at it yet.

    The folder is removed at the end of the block, and those that killed writers of `path` left are removed first.

    Raises:
        OSError: The folder cannot be made.
    """
    remove_abandoned(path.parent, name=path.name)
    with ExitStack() as held:
        folder = _make_held(path, held)
        try:
            yield folder / f".{path.name}.tmp"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(folder: Path, *, name: str | None = None) -> None:
    """Remove the temporary folders in `folder` that no living writer holds; with `name`, only those of that name."""
    try:
        present = [
            path
            for path in folder.iterdir()
            if (match := _NAME.fullmatch(path.name)) and name in (None, match["name"])
        ]
    except OSError:
        return  # missing, or not to be listed
    for path in present:
        if path.is_dir() and not path.is_symlink():
            _remove_unless_held(path)


def is_temporary_folder(path: Path) -> bool:
    """Decide whether a path has the name of a temporary folder."""
    return _NAME.fullmatch(path.name) is not None


def _make_held(path: Path, held: ExitStack) -> Path:
    for _ in range(_NUM_ATTEMPTS):
        folder = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        folder.mkdir()
        try:
            held.enter_context(hold_file(folder / _LOCK_NAME))
        except (BlockingIOError, FileNotFoundError):
            continue  # a writer of the same name took the folder for abandoned before it was locked
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return folder
    raise OSError(errno.EBUSY, "its temporary folder was removed by another process", str(path))


def _remove_unless_held(folder: Path) -> None:
    try:
        with hold_file(folder / _LOCK_NAME):
            shutil.rmtree(folder)
    except OSError:
        return  # its writer lives, another process removes it right now, or it cannot be told
