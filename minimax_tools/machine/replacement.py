"""Replacement: a capture's files are written beside their place and take it when they are whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from minimax_tools.errors import CaptureError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = re.compile(r"\..+\.(safetensors|json)(\.[0-9a-f]{8})?\.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`, which takes its place once the block has ended well.

    Raises:
        CaptureError: The disk is full, or cannot be written to.
    """
    # A name of its own: who outlived a run that another one goes on with may be writing the same file.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        # safetensors writes files that only their owner may read; captures travel between people.
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def remove_temporaries(directory: Path) -> None:
    """Remove what a killed run was writing in `directory`."""
    for path in directory.iterdir():
        if is_temporary(path):
            path.unlink()


def is_temporary(path: Path) -> bool:
    """Decide whether a file is one that `replacing` made and a killed run left behind."""
    return _TEMPORARY.fullmatch(path.name) is not None


def _unwritable(path: Path, error: Exception) -> CaptureError:
    # safetensors names the error's number in its text alone.
    is_full = getattr(error, "errno", None) in _FULL or any(
        f"os error {code}" in str(error) for code in _FULL
    )
    if not is_full:
        return CaptureError(
            f"cannot write {path}", found=str(error), next_step="Mend that, or choose another --output-dir."
        )
    free = shutil.disk_usage(path.parent).free
    return CaptureError(
        f"no space left to write {path}",
        found=f"{free / 1e6:.1f} MB free",
        next_step="Free some space and run the same command again: it resumes after the stored layers. "
        "Or choose another --output-dir, or capture less (--sites layer, --noise-floor stats).",
    )
