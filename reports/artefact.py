"""Artefact: a report's file, which is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from minimax_tools.errors import CannotRunError


def write_artefact(path: Path, text: str) -> Path:
    """Write `text` as UTF-8 to a temporary sibling, rename it to `path`, and return `path`.

    Missing folders are made.

    Raises:
        CannotRunError: The folder cannot be made or written to, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8", newline="")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CannotRunError(
            f"cannot write the report {path}",
            found=error.strerror or str(error),
            next_step="Choose another directory for reports, one that can be written to.",
        ) from error
    return path
