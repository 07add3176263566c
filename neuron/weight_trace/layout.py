"""PlaceLayout: what a place holds, matrix by matrix, and in words."""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from neuron.weight_trace.origin import ASIDE, COMPUTED, CONSTANT, Origin
from neuron.weight_trace.piece import IN_NO_ORDER, RESHAPED, WeightPiece
from neuron.weight_trace.sequences import Sequence
from neuron.weight_trace.sources import Sources, role, word_experts

# Of more pieces those that repeat are put together.
MOST_PIECES = 6
_MOST_STRIDE = 64


def read_matrix(numbers: torch.Tensor, sources: Sources) -> list[WeightPiece]:
    """The pieces of a matrix [R,C]."""
    grid = _Grid.of(numbers, sources)
    if grid.is_straight():
        return _read_lines(grid, sources)
    turned = grid.turned()
    if turned.is_straight():
        return [replace(piece, is_transposed=True) for piece in _read_lines(turned, sources)]
    for cut, is_transposed in ((turned, True), (grid, False)):
        # Tensors side by side: cut where one ends.
        ends = (cut.source[1:] != cut.source[:-1]).any(dim=1).nonzero().flatten().add(1).tolist()
        if 0 < len(ends) < _MOST_STRIDE:
            return _read_side_by_side(numbers.T if is_transposed else numbers, ends, sources, is_transposed)
    return [_torn_piece(numbers, sources)]


def _read_side_by_side(
    numbers: torch.Tensor, ends: Values[int], sources: Sources, is_transposed: bool
) -> list[WeightPiece]:
    pieces: list[WeightPiece] = []
    bounds = [0, *ends, len(numbers)]
    for start, stop in pairwise(bounds):
        # Each part is read as it lies in the place: its own rows may be the source's rows.
        part = numbers[start:stop]
        unit = "columns" if is_transposed else "rows"
        for piece in read_matrix(part.T if is_transposed else part, sources):
            text = piece.words(len(piece.lines)) if len(piece.lines) else piece.what
            pieces.append(replace(piece, what=f"{unit} {start}–{stop - 1} {text}"))
    return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Of each element of a matrix its source's index, -1 and -2 where there is none, and its row and column there."""

    source: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor, sources: Sources) -> _Grid:
        index = sources.find(numbers.clamp(min=0))
        inside = numbers - sources.starts[index]
        width = torch.tensor([source.width for source in sources.all])[index]
        is_single = numbers >= 0
        return cls(
            source=torch.where(is_single, index, numbers),
            row=torch.where(is_single, inside // width, 0),
            column=torch.where(is_single, inside % width, 0),
        )

    def turned(self) -> _Grid:
        """The transposed matrix; its sources are what they are."""
        return _Grid(source=self.source.T, row=self.row.T, column=self.column.T)

    def is_straight(self) -> bool:
        """Whether every line holds one row of one source."""
        return bool(((self.source == self.source[:, :1]) & (self.row == self.row[:, :1])).all())


def _read_lines(grid: _Grid, sources: Sources) -> list[WeightPiece]:
    of_line = grid.source[:, 0]
    breaks = (of_line[1:] != of_line[:-1]).nonzero().flatten().add(1).tolist()
    if len(breaks) >= MOST_PIECES:
        for step in range(2, min(_MOST_STRIDE, len(of_line) // 2) + 1):
            if len(of_line) % step == 0 and bool((of_line[step:] == of_line[:-step]).all()):
                lines = [range(start, len(of_line), step) for start in range(step)]
                return [_piece(grid, of, sources) for of in lines]
    bounds = [0, *breaks, len(of_line)]
    return [_piece(grid, range(*of), sources) for of in pairwise(bounds)]


def _piece(grid: _Grid, lines: range, sources: Sources) -> WeightPiece:
    chosen = slice(lines.start, lines.stop, lines.step)
    index = int(grid.source[lines.start, 0])
    if index < 0:
        what = {
            CONSTANT: "nothing of the checkpoint",
            COMPUTED: "computed values",
            ASIDE: "what was not followed",
        }[index]
        return WeightPiece(lines=lines, what=what)
    columns = grid.column[chosen]
    if not bool((columns == columns[:1]).all()):
        kind = sources.all[index].kind
        return WeightPiece(lines=lines, what=f"{IN_NO_ORDER} of {role(kind)}", torn=(kind,))
    return WeightPiece(
        lines=lines,
        source=sources.all[index],
        rows=Sequence(indices=grid.row[chosen, 0]),
        columns=Sequence(indices=columns[0]),
    )


def _torn_piece(numbers: torch.Tensor, sources: Sources) -> WeightPiece:
    """What is no piece of any source: reshaped where its elements go on from line to line, or mixed."""
    flat = numbers.flatten()
    indices = sources.find(flat[flat >= 0]).unique().tolist()
    held = [sources.all[index] for index in indices]
    kinds = tuple(dict.fromkeys(source.kind for source in held))
    words = ", ".join(map(role, kinds)) or "nothing of the checkpoint"
    what = f"{IN_NO_ORDER} of {words}"
    if len(held) == 1 and held[0].size == len(flat):
        whole = torch.arange(held[0].start, held[0].start + held[0].size).reshape(held[0].shape)
        if torch.equal(flat, whole.flatten()):
            what = f"{RESHAPED}: {words} reshaped, and not transposed"
        elif torch.equal(flat, whole.T.flatten()):
            what = f"{RESHAPED}: {words} transposed, and reshaped back"
    elif bool((flat == COMPUTED).any()):
        what += " and computed values" if held else ""
    return WeightPiece(lines=range(len(numbers)), what=what, torn=kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLayout:
    """What a place holds.

    Args:
        origin: Where its elements come from.
        matrices: Its pieces, for each index of what lies before its last two dims.
        experts: The expert of each matrix; empty where they are of none, or of several.
        text: In words.
    """

    origin: Origin
    matrices: tuple[tuple[WeightPiece, ...], ...]
    experts: tuple[int, ...]
    text: str

    @property
    def pieces(self) -> tuple[WeightPiece, ...]:
        """All of them."""
        return tuple(piece for matrix in self.matrices for piece in matrix)


def find_layout(origin: Origin, sources: Sources) -> PlaceLayout:
    """The layout of a place."""
    numbers = _experts_first(origin.numbers, sources)
    if numbers.dim() < 2:
        numbers = numbers.reshape(-1, 1)
    stacked = numbers.reshape(-1, *numbers.shape[-2:])
    if len(stacked) == 1:
        stacked = _by_period(stacked[0], sources)
    matrices = tuple(tuple(read_matrix(matrix, sources)) for matrix in stacked)
    experts = _experts_of(matrices)
    return PlaceLayout(
        origin=origin,
        matrices=matrices,
        experts=experts,
        text=_word(matrices, experts, stacked.shape[-2:], is_stacked=numbers.dim() > 2),
    )


def _experts_first(numbers: torch.Tensor, sources: Sources) -> torch.Tensor:
    """The dim along which experts lie side by side brought to the front, where it is another."""
    if numbers.dim() < 3:
        return numbers
    experts = torch.tensor([-1 if source.expert is None else source.expert for source in sources.all])
    of_element = torch.where(numbers >= 0, experts[sources.find(numbers.clamp(min=0))], -1)
    for dim in range(numbers.dim()):
        lines = of_element.movedim(dim, 0).flatten(1)
        filled = lines.max(dim=1, keepdim=True).values
        if bool(((lines == filled) | (lines < 0)).all()):
            return numbers.movedim(dim, 0)
    return numbers


def _by_period(matrix: torch.Tensor, sources: Sources) -> torch.Tensor:
    """A matrix of many short pieces cut where they begin to repeat, [1,R,C] to [n,R/n,C]."""
    kinds = {kind: number for number, kind in enumerate(sorted({source.kind for source in sources.all}))}
    of_source = torch.tensor([kinds[source.kind] for source in sources.all])
    experts = torch.tensor([-1 if source.expert is None else source.expert for source in sources.all])
    if bool((matrix < 0).any()):
        return matrix[None]
    indices = sources.find(matrix[:, 0])
    of_line, of_expert = of_source[indices], experts[indices]
    if int((indices[1:] != indices[:-1]).sum()) < MOST_PIECES:
        return matrix[None]
    starts = [
        0,
        *((of_line[1:] != of_line[:-1]) | (of_expert[1:] != of_expert[:-1]))
        .nonzero()
        .flatten()
        .add(1)
        .tolist(),
    ]
    for start in starts[1:]:
        if len(of_line) % start == 0 and start > 1 and bool((of_line[start:] == of_line[:-start]).all()):
            return matrix.reshape(-1, start, matrix.shape[1])
    return matrix[None]


def _experts_of(matrices: tuple[tuple[WeightPiece, ...], ...]) -> tuple[int, ...]:
    experts: list[int] = []
    for matrix in matrices:
        found = {piece.source.expert for piece in matrix if piece.source is not None}
        if len(found) != 1 or None in found:
            return ()
        experts.extend(expert for expert in found if expert is not None)
    return tuple(experts)


def _word(
    matrices: tuple[tuple[WeightPiece, ...], ...],
    experts: tuple[int, ...],
    shape: torch.Size,
    *,
    is_stacked: bool,
) -> str:
    texts = [_word_matrix(matrix, shape) for matrix in matrices]
    if len(matrices) == 1:
        of = f" of expert {experts[0]}" if experts else ""
        return f"{texts[0]}{of}"
    each = "" if is_stacked else f" of {shape[0]} rows each"
    if experts and len(set(texts)) == 1:
        return f"{word_experts(experts)}{each}: {texts[0]}"
    going_on = _word_going_on(matrices)
    if going_on is not None:
        return going_on
    if len(set(texts)) == 1:
        return f"{len(texts)} times{each}: {texts[0]}"
    first = next(index for index, text in enumerate(texts) if text != texts[0])
    return (
        f"{len(texts)} parts{each}, of unequal content: the first {texts[0]}; number {first} {texts[first]}"
    )


def _word_matrix(matrix: Values[WeightPiece], shape: torch.Size) -> str:
    parts = [
        piece.what
        if piece.source is not None and piece.what
        else piece.words(shape[1] if piece.is_transposed else shape[0])
        for piece in matrix
    ]
    return ", ".join(parts)


def _word_going_on(matrices: tuple[tuple[WeightPiece, ...], ...]) -> str | None:
    """Parts that each go on where the one before ended: the groups of heads of a fused projection."""
    sizes = []
    for pieces in zip(*matrices, strict=False):
        at: dict[str, int] = {}
        for piece in pieces:
            if piece.source is None or piece.rows is None or not piece.is_in_order or piece.is_transposed:
                return None
            first = int(piece.rows.indices[0])
            if first != at.get(piece.source.name, 0):
                return None
            at[piece.source.name] = first + len(piece.rows.indices)
        source = pieces[0].source
        assert source is not None, "checked above"
        sizes.append(f"{len(pieces[0].lines)} rows of {role(source.kind)}")
    return f"{len(matrices)} times the next {', '.join(sizes)}"
