"""Tensor layout: which rows and columns of source tensors a port tensor holds, matrix by matrix, and as text.

A source tensor is a tensor of the checkpoint's layer. A *line* is a row of a matrix of a port tensor, or a column if
the port holds the source tensor transposed. A source number tells which element of the checkpoint's layer landed in the
port's tensor; negative ones, that none did. R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

import torch

from neuron.weight_trace.port_tensors import name_numbers, name_pattern
from neuron.weight_trace.source_tensors import (
    COMPUTED,
    CONSTANT,
    NOT_SAMPLED,
    SourceTensor,
    SourceTensors,
    TensorOrigin,
    kinds_of,
    word_experts,
)

# Runs of indices, or indices besides the last one, that a text lists.
_NUM_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSequence:
    """A sequence of indices, whose text depends on its pattern.

    | indices | text |
    |---|---|
    | 3 4 5 6 | `3–6` |
    | 3 3 3 | `3 3 times` |
    | 0 2 4 6 | `0, 2, 4, 6` |
    | 3 5 6 3 5 6 | `3, 5–6, repeated 2 times` |
    | 1 0 3 2 | `in each 2: 1, 0` |
    | 4 5 0 1 9 | `4–5, 0–1, 9` |

    `in each 2` speaks of blocks of two neighbours, wherever they lie: 11 10 13 12 has the same text. So ranks that
    reorder their own rows alike have one text.
    """

    indices: torch.Tensor  # 1-D, int64, at least one index, none below 0

    @property
    def is_ascending(self) -> bool:
        """True if each index is one more than the index before."""
        return bool((self.indices[1:] - self.indices[:-1] == 1).all())

    @property
    def is_repeated(self) -> bool:
        """True if the whole sequence repeats a shorter one."""
        return self._block_length(advances=False) is not None

    def __str__(self) -> str:
        indices = self.indices
        if len(indices) == 1:
            return str(int(indices[0]))
        if self.is_ascending:
            return f"{int(indices[0])}–{int(indices[-1])}"
        steps = indices[1:] - indices[:-1]
        if bool((steps == steps[0]).all()):
            return f"{int(indices[0])} {len(indices)} times" if int(steps[0]) == 0 else _word_list(indices)
        length = self._block_length(advances=False)
        if length is not None:
            return f"{IndexSequence(indices=indices[:length])}, repeated {len(indices) // length} times"
        length = self._block_length(advances=True)
        if length is not None:
            first = indices[:length] - indices[:length].min()
            # Only a block of neighbours: 0 5 2 7 advances by blocks of 2 too, but 0 and 5 are none.
            if torch.equal(first.sort().values, torch.arange(length)):
                return f"in each {length}: {_word_list(first)}"
        runs = torch.tensor_split(indices, (steps != 1).nonzero().flatten() + 1)
        if len(runs) <= _NUM_SHOWN:
            return ", ".join(str(IndexSequence(indices=run)) for run in runs)
        return _word_list(indices)

    def _block_length(self, *, advances: bool) -> int | None:
        """Return the length of the shortest equal blocks that make up the sequence; None if there are none.

        If it `advances`, a block is the block before with its length added to each index: 1 0 3 2 5 4 has blocks of 2.
        """
        count = len(self.indices)
        for length in range(1, count // 2 + 1):
            added = length if advances else 0
            if count % length == 0 and bool((self.indices[length:] - self.indices[:-length] == added).all()):
                return length
        return None


def _word_list(indices: torch.Tensor) -> str:
    """Return the indices as text; of more than `_NUM_SHOWN`, the first ones and the last."""
    shown = [str(int(index)) for index in indices[:_NUM_SHOWN]]
    if len(indices) > _NUM_SHOWN + 1:
        shown.append("…")
    if len(indices) > _NUM_SHOWN:
        shown.append(str(int(indices[-1])))
    return ", ".join(shown)


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
        text = f"{position}{self.source.word}"
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
        return _mixed_segment(lines, num_lines, [source])
    return LayoutSegment(
        lines=lines,
        num_lines=num_lines,
        source=source,
        rows=IndexSequence(indices=grid.row[chosen, 0]),
        columns=IndexSequence(indices=columns[0]),
    )


def _mixed_segment(
    lines: range, num_lines: int, held: Sequence[SourceTensor], *, has_computed: bool = False
) -> LayoutSegment:
    words = ", ".join(dict.fromkeys(source.word for source in held))
    description = f"elements in no order of {words or 'nothing of the checkpoint'}"
    if held and has_computed:
        description += " and computed values"
    return LayoutSegment(
        lines=lines,
        num_lines=num_lines,
        description=description,
        disorder=Disorder.MIXED,
        disordered_kinds=kinds_of(held),
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
                    description=f"rows torn: {sources.word(kinds)} {change}",
                    disorder=Disorder.RESHAPED,
                    disordered_kinds=kinds,
                )
    return _mixed_segment(lines, len(lines), sources_held, has_computed=bool((flat == COMPUTED).any()))


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


# Segments of one matrix.
Matrix = tuple[LayoutSegment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """Layout of a port tensor."""

    origin: TensorOrigin
    matrices: tuple[Matrix, ...]  # segments of each matrix, in the order in which the tensor stacks them
    # The expert of each matrix; empty unless each holds tensors of exactly one expert.
    experts: tuple[int, ...]
    text: str  # the layout as text, such as `experts 0–11: w2 (down)`

    @property
    def segments(self) -> Matrix:
        """Segments of all matrices."""
        return tuple(segment for matrix in self.matrices for segment in matrix)

    @property
    def source_kinds(self) -> tuple[str, ...]:
        """Kinds of the source tensors whose rows lie here, each once."""
        return kinds_of(segment.source for segment in self.segments if segment.source is not None)


def read_layout(origin: TensorOrigin, sources: SourceTensors) -> TensorLayout:
    """Read the layout of a port tensor from the origins of its elements.

    `origin.numbers` holds the source number of each element, negative for an element without one.
    """
    stacked = stack_matrices(origin, sources)
    matrices = tuple(tuple(read_segments(matrix, sources)) for matrix in stacked)
    experts = _experts_of(matrices)
    return TensorLayout(
        origin=origin,
        matrices=matrices,
        experts=experts,
        text=_word_layout(matrices, experts, stacked.shape[-2:], is_stacked=origin.numbers.dim() > 2),
    )


def stack_matrices(origin: TensorOrigin, sources: SourceTensors) -> torch.Tensor:
    """Return the source numbers of a port tensor as matrices [n,R,C].

    The last two dims are a matrix, after the dim that counts experts has moved to the front. A single matrix may be cut
    by rows into several.
    """
    numbers = _experts_first(origin.numbers, sources)
    if numbers.dim() < 2:
        numbers = numbers.reshape(-1, 1)
    stacked = numbers.reshape(-1, *numbers.shape[-2:])
    return _cut_where_repeated(stacked[0], sources) if len(stacked) == 1 else stacked


def expert_orders(layouts: Sequence[TensorLayout]) -> Iterator[tuple[list[TensorLayout], tuple[int, ...]]]:
    """Group expert tensors by name pattern; yield each group, sorted by the names' numbers, and its experts.

    So `experts.0.w2`, `experts.1.w2` and so on are a group, and its experts should be 0, 1 and so on.
    """
    groups: dict[str, list[TensorLayout]] = {}
    for layout in layouts:
        if layout.experts:
            groups.setdefault(name_pattern(layout.origin.name), []).append(layout)
    for group in groups.values():
        group.sort(key=lambda layout: name_numbers(layout.origin.name))
        yield group, tuple(expert for layout in group for expert in layout.experts)


def _experts_first(numbers: torch.Tensor, sources: SourceTensors) -> torch.Tensor:
    """Move the dim that counts experts to the front; the dims stay if none does."""
    if numbers.dim() < 3:
        return numbers
    experts = torch.where(numbers >= 0, sources.find_experts(numbers.clamp(min=0)), -1)
    for dim in range(numbers.dim()):
        # The dim that counts experts: each of its slices holds elements of one expert, besides those of no expert.
        slices = experts.movedim(dim, 0).flatten(1)
        expert_of_slice = slices.max(dim=1, keepdim=True).values
        if bool(((slices == expert_of_slice) | (slices < 0)).all()):
            return numbers.movedim(dim, 0)
    return numbers


def _cut_where_repeated(matrix: torch.Tensor, sources: SourceTensors) -> torch.Tensor:
    """Cut a matrix [R,C] into n matrices [n,R/n,C] where its kinds begin to repeat; [1,R,C] if they do not.

    Two layouts need it: experts stacked by rows in one matrix, and a fused projection with q, k and v of one head after
    the other. A matrix of one expert, or of none, is not cut if it has few segments. Nor is a matrix with an element
    without a source.
    """
    if bool((matrix < 0).any()):
        return matrix[None]
    first_column = matrix[:, 0]
    indices = sources.find(first_column)
    experts = sources.find_experts(first_column)
    num_changes = int((indices[1:] != indices[:-1]).sum())
    if num_changes < MAX_SEGMENTS and len(experts.unique()) == 1:
        return matrix[None]
    kind_numbers = {kind: number for number, kind in enumerate(kinds_of(sources.all))}
    kinds = torch.tensor([kind_numbers[source.kind] for source in sources.all])[indices]
    is_start = (kinds[1:] != kinds[:-1]) | (experts[1:] != experts[:-1])
    for start in is_start.nonzero().flatten().add(1).tolist():
        if len(kinds) % start == 0 and start > 1 and bool((kinds[start:] == kinds[:-start]).all()):
            return matrix.reshape(-1, start, matrix.shape[1])
    return matrix[None]


def _experts_of(matrices: tuple[Matrix, ...]) -> tuple[int, ...]:
    """Return the expert of each matrix; empty if a matrix holds no expert, or several."""
    experts: list[int] = []
    for matrix in matrices:
        experts_held = {segment.source.expert for segment in matrix if segment.source is not None}
        if len(experts_held) != 1:
            return ()
        expert = experts_held.pop()
        if expert is None:
            return ()
        experts.append(expert)
    return tuple(experts)


def _word_layout(
    matrices: tuple[Matrix, ...], experts: tuple[int, ...], shape: torch.Size, *, is_stacked: bool
) -> str:
    """Return a layout of matrices [R,C] as text; `is_stacked` if a dim of the port tensor counts the matrices."""
    texts = [", ".join(segment.as_text() for segment in matrix) for matrix in matrices]
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
    """Return the text of matrices that each continue the rows of the matrix before; None if they do not.

    So lies a projection that fuses q, k and v of one group of heads after the other.
    """
    if len({tuple(segment.lines for segment in matrix) for matrix in matrices}) > 1:
        return None
    sizes = []
    # The segments at one place of all matrices: q of each group of heads, then k, then v.
    for segments in zip(*matrices, strict=True):
        next_row: dict[str, int] = {}
        for segment in segments:
            source, rows = segment.source, segment.rows
            if source is None or rows is None or not segment.is_in_order or segment.is_transposed:
                return None
            if int(rows.indices[0]) != next_row.get(source.name, 0):
                return None
            next_row[source.name] = int(rows.indices[0]) + len(rows.indices)
        sizes.append(f"{len(segments[0].lines)} rows of {source.word}")
    return f"{len(matrices)} times the next {', '.join(sizes)}"
