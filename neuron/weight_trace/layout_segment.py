"""Layout segment: neighbouring rows or columns of a port tensor that one source tensor fills, or none does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from neuron.weight_trace.source_tensors import SourceTensor, word_kinds

_NUM_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSequence:
    """A sequence of indices, and its text.

    Args:
        indices: 1-D int64, none below 0.
    """

    indices: torch.Tensor

    @property
    def is_forward(self) -> bool:
        """True if each index is one more than the index before."""
        return bool((self.indices[1:] - self.indices[:-1] == 1).all())

    @property
    def is_repeated(self) -> bool:
        """True if a run of indices repeats."""
        return self._period(step=0) is not None

    def __str__(self) -> str:
        indices = self.indices
        if len(indices) == 1:
            return str(int(indices[0]))
        if self.is_forward:
            return f"{int(indices[0])}–{int(indices[-1])}"
        steps = indices[1:] - indices[:-1]
        if bool((steps == steps[0]).all()):
            return f"{int(indices[0])} {len(indices)} times" if int(steps[0]) == 0 else _listed(indices)
        period = self._period(step=0)
        if period is not None:
            return f"{IndexSequence(indices=indices[:period])}, repeated {len(indices) // period} times"
        block = self._period(step=1)
        if block is not None:
            return f"in each {block}: {_listed(indices[:block] - indices[:block].min())}"
        runs = torch.tensor_split(indices, (steps != 1).nonzero().flatten() + 1)
        if len(runs) <= _NUM_SHOWN:
            return ", ".join(str(IndexSequence(indices=run)) for run in runs)
        return _listed(indices)

    def _period(self, *, step: int) -> int | None:
        """Return the shortest length after which the indices repeat, each `step` times that length higher."""
        count = len(self.indices)
        for period in range(1, count // 2 + 1):
            shift = step * period
            if count % period == 0 and bool((self.indices[period:] - self.indices[:-period] == shift).all()):
                return period
        return None


def _listed(indices: torch.Tensor) -> str:
    shown = [str(int(index)) for index in indices[:_NUM_SHOWN]]
    more = [] if len(indices) <= _NUM_SHOWN + 1 else ["…"]
    last = [str(int(indices[-1]))] if len(indices) > _NUM_SHOWN else []
    return ", ".join([*shown, *more, *last])


class Disorder(Enum):
    """Kind of disorder in a segment that holds no whole rows or columns of a source tensor."""

    RESHAPED = "reshaped"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSegment:
    """Neighbouring lines of a matrix of a port tensor.

    Args:
        lines: Its rows in the port tensor; its columns where `is_transposed`.
        source: The source tensor; None where the lines hold no rows of one.
        is_transposed: True where the port tensor's columns hold the source's rows.
        rows: The source's rows, in the order of the lines.
        columns: The source's columns, in their order along a line.
        content: Text for what the segment holds without a source.
        disorder: Set where elements of source tensors lie in no order of rows or columns.
        disordered_kinds: The kinds of those source tensors.
        within: Text for the part of the matrix that `lines` counts in; empty for the whole matrix.
    """

    lines: range
    source: SourceTensor | None = None
    is_transposed: bool = False
    rows: IndexSequence | None = None
    columns: IndexSequence | None = None
    content: str = ""
    disorder: Disorder | None = None
    disordered_kinds: tuple[str, ...] = ()
    within: str = ""

    @property
    def is_in_order(self) -> bool:
        """True if the source's rows and columns go forward."""
        return self.disorder is None and all(
            sequence is None or sequence.is_forward for sequence in (self.rows, self.columns)
        )

    def words(self, num_lines: int) -> str:
        """Return the segment as text, for a matrix of `num_lines` lines."""
        unit = "columns" if self.is_transposed else "rows"
        lines = self.lines
        where = f"{unit} {lines.start}–{lines[-1]} " if len(lines) > 1 else f"{unit} {lines.start} "
        if self.within or len(lines) == num_lines:
            where = ""
        if lines.step > 1:
            where = f"every {lines.step}th of the {unit} from {lines.start} "
        where = f"{self.within}{where}"
        if self.source is None or self.rows is None or self.columns is None:
            return f"{where}{self.content}"
        text = f"{where}{word_kinds([self.source.kind])}"
        if self.is_transposed:
            text += " transposed"
        if not self.rows.is_forward or len(self.rows.indices) < self.source.shape[0]:
            text += f", its rows {self.rows}"
        if not self.columns.is_forward or len(self.columns.indices) < self.source.width:
            text += f", its columns {self.columns}"
        return text
