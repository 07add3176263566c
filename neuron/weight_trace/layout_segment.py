"""Layout segment: rows or columns of a port tensor, neighbours or every nth, that one source tensor fills, or none.

A source tensor is a tensor of the checkpoint's layer. A *line* is a row of the port tensor, or a column if the port
holds the source tensor transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from neuron.weight_trace.index_sequence import IndexSequence
from neuron.weight_trace.source_tensors import SourceTensor, word_kinds


class Disorder(Enum):
    """Kind of disorder in a segment whose elements do not lie in rows or columns of a source with one order."""

    RESHAPED = "reshaped"  # all elements of one source tensor, flattened in row or column order and cut anew
    MIXED = "mixed"  # elements in no such order


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSegment:
    """Lines of a matrix of a port tensor, or of a part of the matrix."""

    # Numbers of the lines, from 0 in the part that `within` names; a step above 1 if sources take turns line by line.
    lines: range
    num_lines: int  # number of lines of the matrix, or of the part of it that `within` names
    # The source tensor whose rows the lines hold; None if they hold no rows of a single one.
    source: SourceTensor | None = None
    is_transposed: bool = False  # True if the port tensor's columns hold the source's rows
    rows: IndexSequence | None = None  # the source's rows, in the order of the lines; None without a source
    # The source's columns, in their order along a line; None without a source.
    columns: IndexSequence | None = None
    description: str = ""  # text for what the lines hold without a source
    disorder: Disorder | None = None  # set if elements of source tensors lie in no order of rows or columns
    disordered_kinds: tuple[str, ...] = ()  # kinds of those source tensors, such as `q_proj`
    # Text for the part of the matrix, such as `columns 0–63 ` or `columns 0–63 rows 12–15 `; empty for all of it.
    within: str = ""

    @property
    def is_in_order(self) -> bool:
        """True if the source's rows and columns ascend one by one, or no source lies here."""
        return self.disorder is None and all(
            sequence is None or sequence.is_ascending for sequence in (self.rows, self.columns)
        )

    def as_text(self) -> str:
        """Return the segment as text, such as `rows 0–63 q_proj`."""
        position = f"{self.within}{self._word_lines()}"
        if self.source is None or self.rows is None or self.columns is None:
            return f"{position}{self.description}"
        text = f"{position}{word_kinds([self.source.kind])}"
        if self.is_transposed:
            text += " transposed"
        if not self.rows.is_ascending or len(self.rows.indices) < self.source.shape[0]:
            text += f", its rows {self.rows}"
        if not self.columns.is_ascending or len(self.columns.indices) < self.source.width:
            text += f", its columns {self.columns}"
        return text

    def _word_lines(self) -> str:
        """Return the lines as text, such as `rows 0–63 `; empty if the segment is all of the matrix or of its part."""
        unit, lines = "column" if self.is_transposed else "row", self.lines
        if lines.step > 1:
            return f"one {unit} in {lines.step} from {unit} {lines.start}: "
        if len(lines) == self.num_lines:
            return ""
        return f"{unit}s {lines.start}–{lines[-1]} " if len(lines) > 1 else f"{unit} {lines.start} "
