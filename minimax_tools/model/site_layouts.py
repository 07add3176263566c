"""Layouts of a site over ranks: assembly of its tensor from the ranks' pieces.

A layout is written after `@` in a port's `sites`, and in the map of a capture that another tool wrote.

| text | the pieces |
|---|---|
| `@replicate` | the whole, bit-equal on all ranks |
| `@shard(dim)` | parts of equal size along a dim, in rank order |
| `@shard(dim; 0,1,2,-,3,4,5,-)` | blocks of equal size along a dim, in rank order, by their logical numbers: |
| | `-` is padding, and a number that comes twice stands for copies, which must be bit-equal |
| `@partial` | a sum that is still to be reduced |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from minimax_tools.errors import TargetError

_SHARD = re.compile(r"shard\(\s*(?P<dim>-?\d+)\s*(?:;(?P<blocks>[\d\s,-]+))?\)")
_FORMS = "'@replicate', '@partial', '@shard(dim)' or '@shard(dim; 0,1,-,…)'"
_ASK_REDUCTION = (
    "If these are sums that each rank has a part of, a reduction is missing, or the site is @partial; "
    "if they are parts of the tensor, it is @shard(dim)."
)


class SiteLayout(Protocol):
    """Protocol of the forms above."""

    def assemble(self, pieces: Sequence[torch.Tensor], *, what: str) -> torch.Tensor:
        """Assemble the logical tensor.

        Args:
            pieces: Pieces in rank order, on the CPU.
            what: Target, layer and site, for errors.

        Raises:
            TargetError: The pieces are not of this form.
        """

    def cut(self, tensor: torch.Tensor, *, rank: int, num_ranks: int, what: str) -> torch.Tensor:
        """Cut a rank's piece from a logical tensor.

        Raises:
            TargetError: The piece is unknown.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """The whole tensor on every rank."""

    def assemble(self, pieces: Sequence[torch.Tensor], *, what: str) -> torch.Tensor:
        """Return the first piece after proving all pieces equal."""
        _refuse_unequal(dict(enumerate(pieces)), what=what)
        return pieces[0]

    def cut(self, tensor: torch.Tensor, *, rank: int, num_ranks: int, what: str) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def __str__(self) -> str:
        return "@replicate"


def _are_wholes(pieces: Sequence[torch.Tensor]) -> bool:
    """Decide whether all pieces are equal and not zero."""
    return bool(pieces[0].any()) and all(torch.equal(pieces[0], piece) for piece in pieces[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Parts of a sum."""

    def assemble(self, pieces: Sequence[torch.Tensor], *, what: str) -> torch.Tensor:
        """Add up the pieces in float32, rounded once to their dtype."""
        _refuse_other_shapes(pieces, what=what)
        if not pieces[0].is_floating_point() or _are_wholes(pieces):
            raise TargetError(
                f"{what} is no sum that each rank has a part of",
                expected="floating-point numbers that differ between ranks",
                found=str(pieces[0].dtype) if not pieces[0].is_floating_point() else "the same on all ranks",
                next_step="It is @replicate, or a part of it was added up already.",
            )
        total = torch.zeros(pieces[0].shape, dtype=torch.float32)
        for piece in pieces:
            total += piece
        return total.to(pieces[0].dtype)

    def cut(self, tensor: torch.Tensor, *, rank: int, num_ranks: int, what: str) -> torch.Tensor:
        """Raise: the parts of a sum are unknown."""
        raise TargetError(
            f"{what} cannot be fed on several ranks: it is @partial, and a sum does not tell its parts",
            next_step="Name a site behind the reduction, or run on one rank.",
        )

    def __str__(self) -> str:
        return "@partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Parts along a dim.

    Args:
        dim: Dim of the tensor that the port shows; negative numbers count from the last.
        blocks: Logical numbers of the blocks in rank order, equally many on each rank; None for padding. Empty for
            one block on each rank, in order.
    """

    dim: int
    blocks: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        numbers = {number for number in self.blocks if number is not None}
        if self.blocks and numbers != set(range(max(len(numbers), 1))):
            raise TargetError(
                f"the blocks of {self} do not make up a tensor",
                expected="every number from 0 to the last, at least once",
                found=", ".join(map(str, sorted(numbers))) or "padding only",
            )

    def assemble(self, pieces: Sequence[torch.Tensor], *, what: str) -> torch.Tensor:
        """Join the blocks in logical order after proving copies equal."""
        _refuse_other_shapes(pieces, what=what)
        self._refuse_missing_dim(pieces[0], what=what)
        if not self.blocks:
            return torch.cat(list(pieces), dim=self.dim)
        per_rank = self._blocks_per_rank(len(pieces), what=what)
        size = pieces[0].shape[self.dim]
        if size % per_rank:
            raise TargetError(
                f"{what} does not divide into the blocks of {self}",
                expected=f"a multiple of {per_rank} along dim {self.dim} on every rank",
                found=str(list(pieces[0].shape)),
                next_step="Name as many blocks as the ranks hold.",
            )
        copies: dict[int, dict[int, torch.Tensor]] = {}
        for index, number in enumerate(self.blocks):
            if number is not None:
                rank, place = divmod(index, per_rank)
                width = size // per_rank
                block = pieces[rank].narrow(self.dim, place * width, width)
                copies.setdefault(number, {}).setdefault(rank, block)
        for number, of_rank in copies.items():
            _refuse_unequal(of_rank, what=f"{what}, block {number}")
        return torch.cat([next(iter(copies[number].values())) for number in sorted(copies)], dim=self.dim)

    def cut(self, tensor: torch.Tensor, *, rank: int, num_ranks: int, what: str) -> torch.Tensor:
        """Join the rank's blocks, with zeros for padding."""
        self._refuse_missing_dim(tensor, what=what)
        blocks = self.blocks or tuple(range(num_ranks))
        num_blocks = len(set(blocks) - {None})
        per_rank = Sharded(dim=self.dim, blocks=blocks)._blocks_per_rank(num_ranks, what=what)
        size = tensor.shape[self.dim]
        if size % num_blocks:
            raise TargetError(
                f"{what} cannot be fed on several ranks",
                expected=f"a multiple of {num_blocks} along dim {self.dim}",
                found=str(list(tensor.shape)),
                next_step=f"Name the blocks of each rank: {_FORMS}.",
            )
        width = size // num_blocks
        padding = torch.zeros_like(tensor.narrow(self.dim, 0, width))
        own = blocks[rank * per_rank : (rank + 1) * per_rank]
        parts = [
            padding if number is None else tensor.narrow(self.dim, number * width, width) for number in own
        ]
        return torch.cat(parts, dim=self.dim)

    def _blocks_per_rank(self, num_ranks: int, *, what: str) -> int:
        if len(self.blocks) % num_ranks:
            raise TargetError(
                f"{what} is {self}, whose blocks do not divide among the ranks",
                expected=f"as many on each of {num_ranks} ranks",
                found=f"{len(self.blocks)} blocks",
                next_step="Name every rank's blocks, `-` for padding.",
            )
        return len(self.blocks) // num_ranks

    def _refuse_missing_dim(self, tensor: torch.Tensor, *, what: str) -> None:
        if not -tensor.ndim <= self.dim < tensor.ndim:
            raise TargetError(
                f"{what} is {self}, and has no such dim",
                expected=f"a dim from {-tensor.ndim} to {tensor.ndim - 1}",
                found=f"the shape {list(tensor.shape)}",
                next_step="Correct the port's `sites`.",
            )

    def __str__(self) -> str:
        numbers = ",".join("-" if number is None else str(number) for number in self.blocks)
        return f"@shard({self.dim}; {numbers})" if numbers else f"@shard({self.dim})"


def parse_layout(text: str) -> SiteLayout:
    """Parse the text after the `@`.

    Raises:
        TargetError: The text has none of the forms above.
    """
    if text == "replicate":
        return Replicated()
    if text == "partial":
        return Partial()
    match = _SHARD.fullmatch(text)
    try:
        if match is not None:
            return Sharded(dim=int(match["dim"]), blocks=_parse_blocks(match["blocks"]))
    except ValueError:
        pass
    raise TargetError(f"the layout '@{text}' cannot be read", expected=_FORMS)


def _parse_blocks(text: str | None) -> tuple[int | None, ...]:
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    return tuple(None if part == "-" else int(part) for part in parts)


def _refuse_other_shapes(pieces: Sequence[torch.Tensor], *, what: str) -> None:
    for rank, piece in enumerate(pieces):
        if piece.shape != pieces[0].shape or piece.dtype != pieces[0].dtype:
            raise TargetError(
                f"{what} has another shape or dtype on rank {rank} than on rank 0",
                expected=f"{list(pieces[0].shape)} {pieces[0].dtype}",
                found=f"{list(piece.shape)} {piece.dtype}",
                next_step="Every rank must show a piece of the same size; pad where heads do not divide.",
            )


def _refuse_unequal(copies: dict[int, torch.Tensor], *, what: str) -> None:
    """Raise if copies, by rank, differ in any bit."""
    ranks = list(copies)
    first = copies[ranks[0]]
    _refuse_other_shapes(list(copies.values()), what=what)
    # Bytes are compared: a NaN equals itself.
    others = [rank for rank in ranks if not torch.equal(_bytes_of(copies[rank]), _bytes_of(first))]
    if others:
        named = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        largest = max(float((copies[rank].double() - first.double()).abs().max()) for rank in others)
        raise TargetError(
            f"{what} is not the same on all ranks",
            expected=f"what rank {ranks[0]} has, bit for bit",
            found=f"other values on {named}, the largest difference {largest:.3g}",
            next_step=_ASK_REDUCTION,
        )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
