"""Artefact: a report's file, which is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

from minimax_tools.errors import CannotRunError
from minimax_tools.machine.whole_file import whole_file


def write_artefact(path: Path, text: str) -> Path:
    """Write `text` as UTF-8 to `path`, and return `path`.

    Missing folders are made.

    Raises:
        CannotRunError: The folder cannot be made or written to, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, newline="") as file:
            file.write(text)
    except OSError as error:
        raise CannotRunError(
            f"cannot write the report {path}",
            found=error.strerror or str(error),
            next_step="Choose another directory for reports, one that can be written to.",
        ) from error
    return path
