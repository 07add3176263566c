"""Warnings and log messages of foreign code hold no control characters."""

from __future__ import annotations

import logging
import warnings

from minimax_tools.command_line.console import printable_messages


def _format_warning() -> str:
    return warnings.formatwarning("a \x1b[31mport", UserWarning, "port.py", 1, "line")


def test_warning_is_printed_with_escapes() -> None:
    with printable_messages():
        assert "a \\x1b[31mport" in _format_warning()
    assert "\x1b" in _format_warning()


def test_message_of_a_logger_without_handlers_is_printed_with_escapes() -> None:
    assert logging.lastResort is not None
    record = logging.LogRecord("library", logging.WARNING, __file__, 1, "a %s", ("\x07bell",), None)
    with printable_messages():
        assert logging.lastResort.format(record) == "a \\x07bell"
    assert logging.lastResort.format(record) == "a \x07bell"
