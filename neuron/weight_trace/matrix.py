"""Matrices: the pieces that a matrix of a place is made of, from the numbers of the elements that landed there.

A matrix is read line by line: a line is a row of the place that holds (a part of) one row of a source, or, where the
place holds sources transposed, a column of it that does. Lines side by side of one source make a piece.
"""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from neuron.weight_trace.origin import ASIDE, COMPUTED, CONSTANT
from neuron.weight_trace.piece import IN_NO_ORDER, RESHAPED, Piece
from neuron.weight_trace.sequences import Sequence
from neuron.weight_trace.sources import Sources, role

# Of more pieces those that repeat are put together.
MOST_PIECES = 6
_MOST_STRIDE = 64


def read_matrix(numbers: torch.Tensor, sources: Sources) -> list[Piece]:
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
) -> list[Piece]:
    pieces: list[Piece] = []
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


def _read_lines(grid: _Grid, sources: Sources) -> list[Piece]:
    of_line = grid.source[:, 0]
    breaks = (of_line[1:] != of_line[:-1]).nonzero().flatten().add(1).tolist()
    if len(breaks) >= MOST_PIECES:
        for step in range(2, min(_MOST_STRIDE, len(of_line) // 2) + 1):
            if len(of_line) % step == 0 and bool((of_line[step:] == of_line[:-step]).all()):
                lines = [range(start, len(of_line), step) for start in range(step)]
                return [_piece(grid, of, sources) for of in lines]
    bounds = [0, *breaks, len(of_line)]
    return [_piece(grid, range(*of), sources) for of in pairwise(bounds)]


def _piece(grid: _Grid, lines: range, sources: Sources) -> Piece:
    chosen = slice(lines.start, lines.stop, lines.step)
    index = int(grid.source[lines.start, 0])
    if index < 0:
        what = {
            CONSTANT: "nothing of the checkpoint",
            COMPUTED: "computed values",
            ASIDE: "what was not followed",
        }[index]
        return Piece(lines=lines, what=what)
    columns = grid.column[chosen]
    if not bool((columns == columns[:1]).all()):
        kind = sources.all[index].kind
        return Piece(lines=lines, what=f"{IN_NO_ORDER} of {role(kind)}", torn=(kind,))
    return Piece(
        lines=lines,
        source=sources.all[index],
        rows=Sequence(indices=grid.row[chosen, 0]),
        columns=Sequence(indices=columns[0]),
    )


def _torn_piece(numbers: torch.Tensor, sources: Sources) -> Piece:
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
    return Piece(lines=range(len(numbers)), what=what, torn=kinds)
