"""Standard streams, found closed or full; tables as plain text, with aligned columns."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, TextIO

import click

from minimax_tools.errors import CannotRunError


def align_columns(rows: Sequence[Sequence[str]], *, words: Collection[str]) -> Iterator[str]:
    """Yield the rows as lines with aligned columns; the first row has the titles.

    Columns whose titles are in `words` hold words, which are aligned left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if title in words else cell.rjust(width)
            for title, cell, width in zip(rows[0], row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


_STDIN, _STDOUT, _STDERR = range(3)
_ANOTHER_PLACE = "Send it to a file, a pipe, or /dev/null."


class OutputError(CannotRunError):
    """Standard output cannot be written: a full disk, or a closed file."""

    @classmethod
    def of(cls, error: OSError) -> OutputError:
        """Return the error for a failed write to standard output."""
        return cls(
            "standard output cannot be written, and the result is lost",
            found=os.strerror(error.errno or errno.EIO),
            next_step=f"{_ANOTHER_PLACE} Then run the command again.",
        )

    @classmethod
    def of_help(cls, error: BaseException) -> OutputError | None:
        """Return the error if help or version could not be printed while options were read; None for other errors."""
        if not isinstance(error, OSError) or isinstance(error, BrokenPipeError) or error.filename is not None:
            return None
        return cls.of(error)


class _Forgiving(io.FileIO):
    """A file that loses what it cannot write. Progress that cannot be shown must not end a run, a library's neither."""

    def write(self, content: Any) -> int:
        """Write, and say that all was written."""
        with suppress(OSError):
            super().write(content)
        return memoryview(content).nbytes


def require_streams() -> None:
    """Let standard error lose what it cannot write, and give closed streams to /dev/null.

    Otherwise the next file that is opened takes the stream's number, and what a library prints goes into that file.

    Raises:
        OutputError: Standard output is closed.
    """
    closed = [number for number in (_STDIN, _STDOUT, _STDERR) if _is_closed(number)]
    for _ in closed:
        # From the lowest number on, each takes the number of a closed stream.
        os.open(os.devnull, os.O_RDWR)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(_STDERR, "w", closefd=False)),
        encoding=getattr(sys.stderr, "encoding", None),
        errors="backslashreplace",
        line_buffering=True,
    )
    if _STDOUT in closed:
        raise OutputError("standard output is closed, and the result would be lost", next_step=_ANOTHER_PLACE)


def write(text: str, *, ends_line: bool = True, to_stderr: bool = False) -> None:
    """Write text to standard output, or to standard error.

    Raises:
        OutputError: Standard output cannot be written.
        BrokenPipeError: The reader of standard output has gone, as after `| head`.
    """
    end = "\n" if ends_line else ""
    if to_stderr:
        # Not by click, which writes past a live bar.
        sys.stderr.write(text + end)
        sys.stderr.flush()
        return
    try:
        click.echo(text + end, nl=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError.of(error) from error


def drop_output() -> None:
    """Send what standard output still holds to /dev/null: Python would fail once more when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)


def shows_pictures(stream: TextIO) -> bool:
    """Decide whether a stream can show characters beyond ASCII."""
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False
