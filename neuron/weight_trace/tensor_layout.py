"""Tensor layout: which source tensors a port tensor holds, matrix by matrix, and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from neuron.weight_trace.layout_segment import Disorder, IndexSequence, LayoutSegment
from neuron.weight_trace.port_tensors import name_numbers, name_pattern
from neuron.weight_trace.source_tensors import SourceTensors, kinds_of, word_experts, word_kinds
from neuron.weight_trace.tensor_origin import COMPUTED, CONSTANT, NOT_SAMPLED, TensorOrigin

# From this many segments on, a repeating pattern is searched for: nobody reads a longer list.
_MAX_SEGMENTS = 6
# Longest pattern, and most tensors side by side, that count as a layout and not as disorder.
_MAX_PATTERN = 64
_NO_SOURCE = {
    CONSTANT: "nothing of the checkpoint",
    COMPUTED: "computed values",
    NOT_SAMPLED: "experts that were not traced",
}

Matrix = tuple[LayoutSegment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Layout of a port tensor.

    Args:
        matrices: Segments of each matrix; the dims before the last two count the matrices.
        experts: The expert of each matrix; empty where a matrix holds no expert, or several.
    """

    origin: TensorOrigin
    matrices: tuple[Matrix, ...]
    experts: tuple[int, ...]
    text: str

    @property
    def segments(self) -> Matrix:
        """Segments of all matrices."""
        return tuple(segment for matrix in self.matrices for segment in matrix)

    @property
    def source_kinds(self) -> tuple[str, ...]:
        """Kinds of the source tensors whose rows lie here, each once."""
        return kinds_of(segment.source for segment in self.segments if segment.source is not None)


def read_layout(origin: TensorOrigin, sources: SourceTensors) -> TensorLayout:
    """Read the layout of a port tensor from the origins of its elements."""
    numbers = _experts_first(origin.numbers, sources)
    if numbers.dim() < 2:
        numbers = numbers.reshape(-1, 1)
    stacked = numbers.reshape(-1, *numbers.shape[-2:])
    if len(stacked) == 1:
        stacked = _cut_where_repeated(stacked[0], sources)
    matrices = tuple(tuple(_read_matrix(matrix, sources)) for matrix in stacked)
    experts = _experts_of(matrices)
    return TensorLayout(
        origin=origin,
        matrices=matrices,
        experts=experts,
        text=_word(matrices, experts, stacked.shape[-2:], is_stacked=numbers.dim() > 2),
    )


def expert_orders(layouts: Sequence[TensorLayout]) -> Iterator[tuple[list[TensorLayout], tuple[int, ...]]]:
    """Yield tensors of experts whose names differ in numbers alone, sorted by these, and the experts they hold."""
    groups: dict[str, list[TensorLayout]] = {}
    for layout in layouts:
        if layout.experts:
            groups.setdefault(name_pattern(layout.origin.name), []).append(layout)
    for group in groups.values():
        group.sort(key=lambda layout: name_numbers(layout.origin.name))
        yield group, tuple(expert for layout in group for expert in layout.experts)


def _experts_first(numbers: torch.Tensor, sources: SourceTensors) -> torch.Tensor:
    """Move the dim along which experts lie side by side to the front."""
    if numbers.dim() < 3:
        return numbers
    experts = torch.where(numbers >= 0, sources.find_experts(numbers.clamp(min=0)), -1)
    for dim in range(numbers.dim()):
        lines = experts.movedim(dim, 0).flatten(1)
        expert_of_line = lines.max(dim=1, keepdim=True).values
        if bool(((lines == expert_of_line) | (lines < 0)).all()):
            return numbers.movedim(dim, 0)
    return numbers


def _cut_where_repeated(matrix: torch.Tensor, sources: SourceTensors) -> torch.Tensor:
    """Cut a matrix [R,C] of many short segments where their kinds begin to repeat, to [n,R/n,C]; else [1,R,C]."""
    if bool((matrix < 0).any()):
        return matrix[None]
    first_column = matrix[:, 0]
    indices = sources.find(first_column)
    if int((indices[1:] != indices[:-1]).sum()) < _MAX_SEGMENTS:
        return matrix[None]
    numbers = {kind: number for number, kind in enumerate(kinds_of(sources.all))}
    kinds = torch.tensor([numbers[source.kind] for source in sources.all])[indices]
    experts = sources.find_experts(first_column)
    is_start = (kinds[1:] != kinds[:-1]) | (experts[1:] != experts[:-1])
    for start in is_start.nonzero().flatten().add(1).tolist():
        if len(kinds) % start == 0 and start > 1 and bool((kinds[start:] == kinds[:-start]).all()):
            return matrix.reshape(-1, start, matrix.shape[1])
    return matrix[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Position of each element of a matrix [R,C] in its source.

    Args:
        source: Index of the source; below zero where there is none.
    """

    source: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor, sources: SourceTensors) -> _Grid:
        index = sources.find(numbers.clamp(min=0))
        inside = numbers - sources.starts[index]
        width = torch.tensor([source.width for source in sources.all])[index]
        has_source = numbers >= 0
        return cls(
            source=torch.where(has_source, index, numbers),
            row=torch.where(has_source, inside // width, 0),
            column=torch.where(has_source, inside % width, 0),
        )

    @property
    def transposed(self) -> _Grid:
        return _Grid(source=self.source.T, row=self.row.T, column=self.column.T)

    @property
    def has_whole_rows(self) -> bool:
        """True if every line holds one row of one source."""
        return bool(((self.source == self.source[:, :1]) & (self.row == self.row[:, :1])).all())


def _read_matrix(numbers: torch.Tensor, sources: SourceTensors) -> list[LayoutSegment]:
    """Read the segments of a matrix [R,C]."""
    grid = _Grid.of(numbers, sources)
    if grid.has_whole_rows:
        return _read_lines(grid, sources)
    if grid.transposed.has_whole_rows:
        return [replace(segment, is_transposed=True) for segment in _read_lines(grid.transposed, sources)]
    for cut, is_transposed in ((grid.transposed, True), (grid, False)):
        ends = (cut.source[1:] != cut.source[:-1]).any(dim=1).nonzero().flatten().add(1).tolist()
        if 0 < len(ends) < _MAX_PATTERN:
            return _read_side_by_side(numbers, ends, sources, is_transposed=is_transposed)
    return [_read_disorder(numbers, sources)]


def _read_side_by_side(
    numbers: torch.Tensor, ends: list[int], sources: SourceTensors, *, is_transposed: bool
) -> list[LayoutSegment]:
    """Read parts of a matrix one by one; `ends` are columns where `is_transposed`, else rows."""
    dim, unit = (1, "columns") if is_transposed else (0, "rows")
    segments = []
    for start, stop in pairwise([0, *ends, numbers.shape[dim]]):
        for segment in _read_matrix(numbers.narrow(dim, start, stop - start), sources):
            within = f"{unit} {start}–{stop - 1} {segment.within}"
            segments.append(replace(segment, within=within))
    return segments


def _read_lines(grid: _Grid, sources: SourceTensors) -> list[LayoutSegment]:
    source = grid.source[:, 0]
    ends = (source[1:] != source[:-1]).nonzero().flatten().add(1).tolist()
    if len(ends) >= _MAX_SEGMENTS:
        for step in range(2, min(_MAX_PATTERN, len(source) // 2) + 1):
            if len(source) % step == 0 and bool((source[step:] == source[:-step]).all()):
                return [
                    _read_segment(grid, range(start, len(source), step), sources) for start in range(step)
                ]
    return [_read_segment(grid, range(*bounds), sources) for bounds in pairwise([0, *ends, len(source)])]


def _read_segment(grid: _Grid, lines: range, sources: SourceTensors) -> LayoutSegment:
    index = int(grid.source[lines.start, 0])
    if index < 0:
        return LayoutSegment(lines=lines, content=_NO_SOURCE[index])
    source = sources.all[index]
    chosen = slice(lines.start, lines.stop, lines.step)
    columns = grid.column[chosen]
    if not bool((columns == columns[:1]).all()):
        return _mixed_segment(lines, (source.kind,))
    return LayoutSegment(
        lines=lines,
        source=source,
        rows=IndexSequence(indices=grid.row[chosen, 0]),
        columns=IndexSequence(indices=columns[0]),
    )


def _mixed_segment(lines: range, kinds: tuple[str, ...], *, has_computed: bool = False) -> LayoutSegment:
    content = f"elements in no order of {word_kinds(kinds) or 'nothing of the checkpoint'}"
    return LayoutSegment(
        lines=lines,
        content=content + (" and computed values" if kinds and has_computed else ""),
        disorder=Disorder.MIXED,
        disordered_kinds=kinds,
    )


def _read_disorder(numbers: torch.Tensor, sources: SourceTensors) -> LayoutSegment:
    """Read a matrix without whole rows or columns: a reshaped source, or a mixture."""
    flat, lines = numbers.flatten(), range(len(numbers))
    held = [sources.all[index] for index in sources.find(flat[flat >= 0]).unique().tolist()]
    kinds = kinds_of(held)
    if len(held) == 1 and held[0].size == len(flat):
        source = held[0]
        whole = torch.arange(source.start, source.start + source.size).reshape(source.shape)
        for candidate, words in (
            (whole, "reshaped, and not transposed"),
            (whole.T, "transposed, and reshaped back"),
        ):
            if torch.equal(flat, candidate.flatten()):
                return LayoutSegment(
                    lines=lines,
                    content=f"rows torn: {word_kinds(kinds)} {words}",
                    disorder=Disorder.RESHAPED,
                    disordered_kinds=kinds,
                )
    return _mixed_segment(lines, kinds, has_computed=bool((flat == COMPUTED).any()))


def _experts_of(matrices: tuple[Matrix, ...]) -> tuple[int, ...]:
    experts: list[int] = []
    for matrix in matrices:
        found = {segment.source.expert for segment in matrix if segment.source is not None}
        if len(found) != 1 or None in found:
            return ()
        experts.extend(expert for expert in found if expert is not None)
    return tuple(experts)


def _word(
    matrices: tuple[Matrix, ...], experts: tuple[int, ...], shape: torch.Size, *, is_stacked: bool
) -> str:
    texts = [
        ", ".join(segment.words(shape[1] if segment.is_transposed else shape[0]) for segment in matrix)
        for matrix in matrices
    ]
    if len(matrices) == 1:
        return f"{texts[0]} of expert {experts[0]}" if experts else texts[0]
    each = "" if is_stacked else f" of {shape[0]} rows each"
    first_other = next((index for index, text in enumerate(texts) if text != texts[0]), None)
    if experts and first_other is None:
        return f"{word_experts(experts)}{each}: {texts[0]}"
    continued = _word_continued(matrices)
    if continued is not None:
        return continued
    if first_other is None:
        return f"{len(texts)} times{each}: {texts[0]}"
    return (
        f"{len(texts)} parts{each}, of unequal content: the first {texts[0]}; "
        f"number {first_other} {texts[first_other]}"
    )


def _word_continued(matrices: tuple[Matrix, ...]) -> str | None:
    """Word matrices that each continue the rows of the one before, as the groups of heads of a fused projection do."""
    sizes = []
    for segments in zip(*matrices, strict=False):
        next_row: dict[str, int] = {}
        for segment in segments:
            source, rows = segment.source, segment.rows
            if source is None or rows is None or not segment.is_in_order or segment.is_transposed:
                return None
            if int(rows.indices[0]) != next_row.get(source.name, 0):
                return None
            next_row[source.name] = int(rows.indices[0]) + len(rows.indices)
        sizes.append(f"{len(segments[0].lines)} rows of {word_kinds(kinds_of([source]))}")
    return f"{len(matrices)} times the next {', '.join(sizes)}"
