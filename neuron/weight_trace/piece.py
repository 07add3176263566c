"""WeightPiece: lines of a matrix side by side that one source fills, or that none does."""

from __future__ import annotations

from dataclasses import dataclass

from neuron.weight_trace.sequences import Order, Sequence
from neuron.weight_trace.sources import SourceTensors, role

# How the words for what lies there in no order of rows or columns begin.
RESHAPED = "rows torn"
IN_NO_ORDER = "elements in no order"
NO_ORDER = (RESHAPED, IN_NO_ORDER)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """Lines of a place that one source fills; or that none does.

    Args:
        lines: Which lines of the place: rows, or columns where `is_transposed`.
        source: The source; None for what is constant, computed or in no order.
        is_transposed: Whether the place's columns hold the source's rows.
        rows: The source's rows, in the order of the lines.
        columns: The source's columns, in their order along a line.
        what: What it is where there is no source, in words.
        torn: The kinds whose elements lie there in no order of rows or columns.
    """

    lines: range
    source: SourceTensors | None = None
    is_transposed: bool = False
    rows: Sequence | None = None
    columns: Sequence | None = None
    what: str = ""
    torn: tuple[str, ...] = ()

    @property
    def is_in_order(self) -> bool:
        """Whether rows and columns of the source go forward."""
        if self.source is None or self.rows is None or self.columns is None:
            return not self.what.startswith(NO_ORDER)
        return self.rows.order is Order.FORWARD and self.columns.order is Order.FORWARD

    @property
    def is_reshaped(self) -> bool:
        """Whether elements of a source lie there, but its rows were torn."""
        return self.what.startswith(RESHAPED)

    def words(self, num_lines: int) -> str:
        """The piece in words, as one of `num_lines` lines."""
        unit = "columns" if self.is_transposed else "rows"
        lines = f"{self.lines.start}–{self.lines[-1]}" if len(self.lines) > 1 else str(self.lines.start)
        where = "" if len(self.lines) == num_lines else f"{unit} {lines} "
        if self.lines.step > 1:
            where = f"every {self.lines.step}th of the {unit} from {self.lines.start} "
        if self.source is None or self.rows is None or self.columns is None:
            return f"{where}{self.what}"
        text = f"{where}{role(self.source.kind)}"
        if self.is_transposed:
            text += " transposed"
        num_rows = self.source.shape[0]
        if self.rows.order is not Order.FORWARD or len(self.rows.indices) < num_rows:
            text += f", its rows {self.rows}"
        if self.columns.order is not Order.FORWARD or len(self.columns.indices) < self.source.width:
            text += f", its columns {self.columns}"
        return text
