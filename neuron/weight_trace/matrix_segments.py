"""Matrix segments: a matrix of source numbers, read as rows or columns of source tensors.

A source number tells which element of the checkpoint's layer landed in the port's weight; negative ones, that none did.
R rows and C columns of the matrix. A *line* is a row, or a column if the matrix holds a source tensor transposed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from neuron.weight_trace.index_sequence import IndexSequence
from neuron.weight_trace.layout_segment import Disorder, LayoutSegment
from neuron.weight_trace.source_tensors import SourceTensors, kinds_of, word_kinds
from neuron.weight_trace.tensor_origin import COMPUTED, CONSTANT, NOT_SAMPLED

# From this many segments on, a repeating pattern is searched for: nobody reads a longer list.
MAX_SEGMENTS = 6
# Longest pattern, and most tensors side by side, that count as a layout and not as disorder.
_MAX_PATTERN = 64
_NO_SOURCE = {
    CONSTANT: "nothing of the checkpoint",
    COMPUTED: "computed values",
    NOT_SAMPLED: "experts that were not traced",
}


def read_segments(numbers: torch.Tensor, sources: SourceTensors) -> list[LayoutSegment]:
    """Read the segments of a matrix [R,C] of source numbers, as in `TensorOrigin.numbers`."""
    grid = _Grid.of(numbers, sources)
    segments: list[LayoutSegment] = []
    if grid.has_whole_rows:
        segments = _read_lines(grid, sources)
    elif grid.transposed.has_whole_rows:
        segments = [replace(segment, is_transposed=True) for segment in _read_lines(grid.transposed, sources)]
    # A reshaped source of twice the width, say: each line holds half a row, every second line the same half.
    if len(segments) == 1 and segments[0].disorder is not None:
        return [_read_disorder(numbers, sources)]
    if segments:
        return segments
    # Tensors may lie side by side: cut the matrix where the source changes, between columns or else between rows.
    for lines, is_transposed in ((grid.transposed.source, True), (grid.source, False)):
        cuts = (lines[1:] != lines[:-1]).any(dim=1).nonzero().flatten().add(1).tolist()
        if 0 < len(cuts) < _MAX_PATTERN:
            return _read_side_by_side(numbers, cuts, sources, is_transposed=is_transposed)
    return [_read_disorder(numbers, sources)]


def _read_side_by_side(
    numbers: torch.Tensor, cuts: list[int], sources: SourceTensors, *, is_transposed: bool
) -> list[LayoutSegment]:
    """Read the parts of a matrix one by one; it is cut before these columns if `is_transposed`, else rows."""
    dim, unit = (1, "columns") if is_transposed else (0, "rows")
    segments = []
    for start, stop in pairwise([0, *cuts, numbers.shape[dim]]):
        for segment in read_segments(numbers.narrow(dim, start, stop - start), sources):
            within = f"{unit} {start}–{stop - 1} {segment.within}"
            segments.append(replace(segment, within=within))
    return segments


def _read_lines(grid: _Grid, sources: SourceTensors) -> list[LayoutSegment]:
    """Read the segments of a matrix whose lines each hold elements of one row of one source."""
    source, num_lines = grid.source[:, 0], len(grid.source)
    cuts = (source[1:] != source[:-1]).nonzero().flatten().add(1).tolist()
    if len(cuts) >= MAX_SEGMENTS:
        # Sources that take turns: one segment for each, of every `step`th line.
        for step in range(2, min(_MAX_PATTERN, num_lines // 2) + 1):
            if num_lines % step == 0 and bool((source[step:] == source[:-step]).all()):
                return [_read_segment(grid, range(start, num_lines, step), sources) for start in range(step)]
    return [_read_segment(grid, range(*bounds), sources) for bounds in pairwise([0, *cuts, num_lines])]


def _read_segment(grid: _Grid, lines: range, sources: SourceTensors) -> LayoutSegment:
    index, num_lines = int(grid.source[lines.start, 0]), len(grid.source)
    if index < 0:
        return LayoutSegment(lines=lines, num_lines=num_lines, description=_NO_SOURCE[index])
    source = sources.all[index]
    chosen = slice(lines.start, lines.stop, lines.step)
    columns = grid.column[chosen]
    if not bool((columns == columns[:1]).all()):
        # The columns lie in another order in each line.
        return _mixed_segment(lines, num_lines, (source.kind,))
    return LayoutSegment(
        lines=lines,
        num_lines=num_lines,
        source=source,
        rows=IndexSequence(indices=grid.row[chosen, 0]),
        columns=IndexSequence(indices=columns[0]),
    )


def _mixed_segment(
    lines: range, num_lines: int, kinds: tuple[str, ...], *, has_computed: bool = False
) -> LayoutSegment:
    description = f"elements in no order of {word_kinds(kinds) or 'nothing of the checkpoint'}"
    if kinds and has_computed:
        description += " and computed values"
    return LayoutSegment(
        lines=lines,
        num_lines=num_lines,
        description=description,
        disorder=Disorder.MIXED,
        disordered_kinds=kinds,
    )


def _read_disorder(numbers: torch.Tensor, sources: SourceTensors) -> LayoutSegment:
    """Read a matrix without whole rows or columns: a reshaped source, or a mixture."""
    flat, lines = numbers.flatten(), range(len(numbers))
    sources_held = [sources.all[index] for index in sources.find(flat[flat >= 0]).unique().tolist()]
    kinds = kinds_of(sources_held)
    if len(sources_held) == 1 and sources_held[0].size == len(flat):
        source = sources_held[0]
        in_order = torch.arange(source.start, source.start + source.size).reshape(source.shape)
        for candidate, change in (
            (in_order, "reshaped, and not transposed"),
            (in_order.T, "transposed, and reshaped back"),
        ):
            if torch.equal(flat, candidate.flatten()):
                return LayoutSegment(
                    lines=lines,
                    num_lines=len(lines),
                    description=f"rows torn: {word_kinds(kinds)} {change}",
                    disorder=Disorder.RESHAPED,
                    disordered_kinds=kinds,
                )
    return _mixed_segment(lines, len(lines), kinds, has_computed=bool((flat == COMPUTED).any()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Position of each element of a matrix in its source; all three [R,C], int64."""

    # Index of the source in `SourceTensors.all`; `CONSTANT`, `COMPUTED` or `NOT_SAMPLED` without one.
    source: torch.Tensor
    row: torch.Tensor  # row in the source; 0 without one
    column: torch.Tensor  # column in the source; 0 without one

    @classmethod
    def of(cls, numbers: torch.Tensor, sources: SourceTensors) -> _Grid:
        index = sources.find(numbers.clamp(min=0))
        number_in_source = numbers - sources.starts[index]
        width = torch.tensor([source.width for source in sources.all])[index]
        has_source = numbers >= 0
        return cls(
            source=torch.where(has_source, index, numbers),
            row=torch.where(has_source, number_in_source // width, 0),
            column=torch.where(has_source, number_in_source % width, 0),
        )

    @property
    def transposed(self) -> _Grid:
        return _Grid(source=self.source.T, row=self.row.T, column=self.column.T)

    @property
    def has_whole_rows(self) -> bool:
        """True if every line holds elements of one row of one source alone, or of no source."""
        return bool(((self.source == self.source[:, :1]) & (self.row == self.row[:, :1])).all())
