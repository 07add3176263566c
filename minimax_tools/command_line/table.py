"""Tables as plain text, with aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


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
