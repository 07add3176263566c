"""A text file that is there whole or not at all: it is written beside its place, and takes it at the end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole_file(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Open a UTF-8 file for writing, which becomes `path` once the block has ended well; the folder must exist.

    Args:
        path: The file.
        newline: As for `open`.

    Raises:
        OSError: It cannot be written; what was at `path` is there still.
    """
    # Two threads of two processes may write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline=newline) as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
