"""Messages of code that mm2 runs but did not write, made fit for a terminal: Python's warnings, and log messages.

A port and its libraries may put any text into them. What they print themselves is theirs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from minimax_tools.printable import printable


@contextmanager
def printable_messages() -> Iterator[None]:
    """Print warnings, and messages of loggers that nobody set up, without control characters while the block runs."""
    format_warning, last_resort = warnings.formatwarning, logging.lastResort

    def format_printable(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        return printable(format_warning(message, category, filename, lineno, line))

    # The text alone is changed: who records warnings records them as before.
    warnings.formatwarning = format_printable
    if last_resort is not None:
        formatter_before = last_resort.formatter
        last_resort.setFormatter(_PrintableFormatter())
    try:
        yield
    finally:
        warnings.formatwarning = format_warning
        if last_resort is not None:
            last_resort.setFormatter(formatter_before)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
