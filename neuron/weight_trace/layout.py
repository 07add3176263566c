"""Layout: what a place holds, matrix by matrix, and in words."""

from __future__ import annotations

from collections.abc import Sequence as Values
from dataclasses import dataclass

import torch

from neuron.weight_trace.matrix import MOST_PIECES, read_matrix
from neuron.weight_trace.origin import Origin
from neuron.weight_trace.piece import Piece
from neuron.weight_trace.sources import Sources, role, word_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a place holds.

    Args:
        origin: Where its elements come from.
        matrices: Its pieces, for each index of what lies before its last two dims.
        experts: The expert of each matrix; empty where they are of none, or of several.
        text: In words.
    """

    origin: Origin
    matrices: tuple[tuple[Piece, ...], ...]
    experts: tuple[int, ...]
    text: str

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of them."""
        return tuple(piece for matrix in self.matrices for piece in matrix)


def find_layout(origin: Origin, sources: Sources) -> Layout:
    """The layout of a place."""
    numbers = _experts_first(origin.numbers, sources)
    if numbers.dim() < 2:
        numbers = numbers.reshape(-1, 1)
    stacked = numbers.reshape(-1, *numbers.shape[-2:])
    if len(stacked) == 1:
        stacked = _by_period(stacked[0], sources)
    matrices = tuple(tuple(read_matrix(matrix, sources)) for matrix in stacked)
    experts = _experts_of(matrices)
    return Layout(
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


def _experts_of(matrices: tuple[tuple[Piece, ...], ...]) -> tuple[int, ...]:
    experts: list[int] = []
    for matrix in matrices:
        found = {piece.source.expert for piece in matrix if piece.source is not None}
        if len(found) != 1 or None in found:
            return ()
        experts.extend(expert for expert in found if expert is not None)
    return tuple(experts)


def _word(
    matrices: tuple[tuple[Piece, ...], ...], experts: tuple[int, ...], shape: torch.Size, *, is_stacked: bool
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


def _word_matrix(matrix: Values[Piece], shape: torch.Size) -> str:
    parts = [
        piece.what
        if piece.source is not None and piece.what
        else piece.words(shape[1] if piece.is_transposed else shape[0])
        for piece in matrix
    ]
    return ", ".join(parts)


def _word_going_on(matrices: tuple[tuple[Piece, ...], ...]) -> str | None:
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
