"""Folders that are written whole or not at all: in a temporary folder first, and renamed at the end."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.machine.durable import make_folder, put_in_place, sync_tree
from minimax_tools.machine.temporary import remove_abandoned, temporary_beside

# The disk, a quota or a limit on the file size is used up.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def new_folder(output: Path, *, size_bytes: int, remedy: str) -> Iterator[Path]:
    """Yield an empty temporary folder. Rename it to `output` if the block succeeds, else remove it.

    Its files are on the disk before it gets its name. What killed writers of `output` left is removed first.

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
    try:
        if _free_bytes(output) < size_bytes:
            raise _no_room(output, size_bytes, reason="", remedy=remedy)
        make_folder(output.parent)
        with temporary_beside(output) as folder:
            folder.mkdir()
            yield folder
            sync_tree(folder)
            put_in_place(folder, output)
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


def refuse_occupied(output: Path) -> None:
    """Raise unless `output` is absent or an empty folder; what killed writers of it left is removed before.

    Raises:
        UsageError: Something is there.
    """
    remove_abandoned(output.parent, name=output.name)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(
            f"{output} exists",
            expected="a new or empty folder",
            next_step="Name another folder, or remove it.",
        )


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
