"""Canvas: lines, paragraphs and tables drawn to a string by rich, coloured only for a terminal."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minimax_tools.printable import printable

if TYPE_CHECKING:
    from minimax_tools.results.results import Verdict

# Piped text must not depend on the width of the terminal that the pipe was started in.
_PIPED_WIDTH = 100
# Lines longer than this are hard to read, however wide the terminal is.
_WIDEST = 120
# Wider than any table, so that rich cuts no figure short; the terminal may break the line.
_UNBOUNDED = 1000
_INDENT = 2
_VERDICT_STYLES = {
    "pass": "bold green",
    "warn": "bold yellow",
    "fail": "bold red",
    "incomparable": "bold red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A table's column: its title, of one or two lines; whether it holds words, and whether sentences to break."""

    title: str
    is_text: bool = False
    is_broken: bool = False


def columns(*titles: str) -> tuple[Column, ...]:
    """Return a table's columns by their titles; `<` before a title stands for words, flush left."""
    return tuple(Column(title=title.removeprefix("<"), is_text=title.startswith("<")) for title in titles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A table's row: one cell for each column, and a rich style for all of them."""

    cells: tuple[str, ...]
    style: str = ""


class Canvas:
    """A text under construction: lines, paragraphs and tables.

    Args:
        width: Characters in a line of the text; None for standard output's own.
        is_terminal: Whether to write escape codes; None to write them if standard output is a terminal.
    """

    def __init__(self, *, width: int | None = None, is_terminal: bool | None = None) -> None:
        self._is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal
        self._width = (_terminal_width() if self._is_terminal else _PIPED_WIDTH) if width is None else width
        self._text = io.StringIO()
        self._console = Console(
            file=self._text,
            width=_UNBOUNDED,
            force_terminal=self._is_terminal,
            force_jupyter=False,
            color_system="standard" if self._is_terminal else None,
            legacy_windows=False,
        )

    @property
    def text(self) -> str:
        """The text without a last newline; for a file or pipe, without blanks at the ends of lines too."""
        lines = self._text.getvalue().split("\n")
        return "\n".join(lines if self._is_terminal else (line.rstrip() for line in lines)).rstrip("\n")

    def gap(self) -> None:
        """Add an empty line."""
        self._console.print()

    def section(self, title: str, *, style: str = "bold") -> None:
        """Begin a section: an empty line, then its title."""
        self.gap()
        self.line(title, style=style)

    def line(self, text: str, *, style: str = "") -> None:
        """Add a line that is never broken, so that a path in it can be copied."""
        self._console.print(_text(text, style=style), soft_wrap=True)  # rich's word for: break no line

    def verdict(self, verdict: Verdict, text: str) -> None:
        """Add a line that says a verdict, in its colour."""
        self.line(text, style=_VERDICT_STYLES[verdict])

    def paragraph(self, text: str, *, style: str = "", indent: int = _INDENT) -> None:
        """Add text broken between words."""
        self._console.print(Padding(_text(text, style=style), (0, 0, 0, indent)), width=self._width)

    def item(self, text: str) -> None:
        """Add an item of a list."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(Text("-"), _text(text))
        self._console.print(Padding(grid, (0, 0, 0, _INDENT), expand=False), width=self._width)

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Add a line for each label and value, never broken, with the values below each other."""
        widest = max((len(label) for label, _ in facts), default=0)
        for label, value in facts:
            self.line(f"{'':{_INDENT}}{label:{widest}}  {value}")

    def table(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Add a table without rules; its columns stand closer if it would not fit."""
        table = _table(columns, rows, gap=2)
        if self._console.measure(table).maximum + _INDENT > self._width:
            table = _table(columns, rows, gap=1)
        width = self._width if self._is_terminal and _has_sentences(columns) else None
        self._console.print(Padding(table, (0, 0, 0, _INDENT), expand=False), width=width)


def _text(text: str, *, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _table(columns: Sequence[Column], rows: Sequence[Row], *, gap: int) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            _text(column.title),
            justify="left" if column.is_text else "right",
            vertical="top" if _has_sentences(columns) else "bottom",
            no_wrap=not column.is_broken,
        )
    for row in rows:
        table.add_row(*(_text(cell) for cell in row.cells), style=row.style)
    return table


def _has_sentences(columns: Sequence[Column]) -> bool:
    return any(column.is_broken for column in columns)


def _terminal_width() -> int:
    return min(shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns, _WIDEST)
