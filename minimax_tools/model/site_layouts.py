"""Site layouts: how the ranks' pieces make up a site's tensor; and the place of a site, as a text names it.

A layout is written after `@` in a port's `sites`, and in the map of a capture that another tool wrote.

| text | a rank's piece |
|---|---|
| `@replicate` | the whole tensor, bit-equal on all ranks |
| `@shard(dim)` | a part along `dim`; parts have one size and lie in rank order |
| `@shard(dim; 0,1,2,-,3,4,5,-)` | as many blocks along `dim` as any other rank, `-` for padding |
| `@partial` | an addend: the ranks' pieces are still to be summed |

Blocks are listed rank after rank by their place in the whole tensor. A block that is listed twice is held twice,
bit-equal. A place is written so:

    model.layers.{layer}.self_attn.qkv_proj:output[0][0:768]@shard(-1)

| part | meaning |
|---|---|
| path | a module's path; all behind it may be left out |
| `:input`, `:output` | the module's input, or its output (the default) |
| `[0]`, `[name]` | which of several inputs or outputs |
| `[start:stop]` | cut of each rank's tensor along its last dim, before ranks are put together |
| `@shard(-1)` | layout of the ranks' pieces |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from minimax_tools.errors import TargetError, UsageError

_SHARD_FORM = re.compile(r"shard\(\s*(?P<dim>-?\d+)\s*(?:;(?P<blocks>[\d\s,-]+))?\)")
_FORMS = "'@replicate', '@partial', '@shard(dim)' or '@shard(dim; 0,1,-,…)'"


class SiteLayout(Protocol):
    """A layout: `Replicated`, `Partial` or `Sharded`."""

    def assemble(self, pieces: Sequence[torch.Tensor], *, what: str) -> torch.Tensor:
        """Assemble the whole tensor from the pieces of two or more ranks in their order, on the CPU.

        `what` names target, layer and site in the TargetError of pieces that contradict the layout.
        """

    def cut(self, tensor: torch.Tensor, *, rank: int, num_ranks: int, what: str) -> torch.Tensor:
        """Cut the piece of `rank`, out of `num_ranks`, to feed it; raise TargetError if it is not determined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """The whole tensor on every rank."""

    def assemble(self, pieces: Sequence[torch.Tensor], *, what: str) -> torch.Tensor:
        """Return the first piece, after checking that all pieces are bit-equal."""
        _refuse_other_shapes(pieces, what=what)
        _refuse_unequal(list(enumerate(pieces)), what=what)
        return pieces[0]

    def cut(self, tensor: torch.Tensor, *, rank: int, num_ranks: int, what: str) -> torch.Tensor:
        """Return the whole tensor."""
        return tensor

    def __str__(self) -> str:
        return "@replicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """An addend on every rank; their sum is the tensor."""

    def assemble(self, pieces: Sequence[torch.Tensor], *, what: str) -> torch.Tensor:
        """Sum the pieces in float32, and round once to their dtype."""
        _refuse_other_shapes(pieces, what=what)
        is_float = pieces[0].is_floating_point()
        if not is_float or _are_equal_and_nonzero(pieces):
            raise TargetError(
                f"{what} is no sum that each rank has a part of",
                expected="floating-point numbers that differ between ranks",
                found="the same on all ranks" if is_float else str(pieces[0].dtype),
                next_step="It is @replicate, or a part of it was added up already.",
            )
        total = torch.zeros(pieces[0].shape, dtype=torch.float32)
        for piece in pieces:
            total += piece
        return total.to(pieces[0].dtype)

    def cut(self, tensor: torch.Tensor, *, rank: int, num_ranks: int, what: str) -> torch.Tensor:
        """Raise TargetError: a sum does not determine its addends."""
        raise TargetError(
            f"{what} cannot be fed on several ranks: it is @partial, and a sum does not tell its parts",
            next_step="Name a site behind the reduction, or run on one rank.",
        )

    def __str__(self) -> str:
        return "@partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Parts along a dim, each of one or several blocks; TargetError if a block of the whole tensor is on no rank."""

    dim: int  # dim of the tensor as the port shows it; negative numbers count from the last
    # Number of each block in the whole tensor, None for padding; listed rank after rank, equally many for each rank.
    # Empty for one block per rank, in rank order.
    blocks: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        numbers = {number for number in self.blocks if number is not None}
        if self.blocks and (not numbers or numbers != set(range(len(numbers)))):
            raise TargetError(
                f"the blocks of {self} do not make up a tensor",
                expected="every number from 0 to the last, at least once",
                found=", ".join(map(str, sorted(numbers))) or "padding only",
            )

    def assemble(self, pieces: Sequence[torch.Tensor], *, what: str) -> torch.Tensor:
        """Join the blocks in the whole tensor's order, after checking that copies are bit-equal."""
        _refuse_other_shapes(pieces, what=what)
        self._refuse_missing_dim(pieces[0], what=what)
        if not self.blocks:
            return torch.cat(list(pieces), dim=self.dim)
        joined = []
        for number, copies in sorted(self._copies_by_block(pieces, what=what).items()):
            _refuse_unequal(copies, what=f"{what}, block {number}")
            _, first_copy = copies[0]
            joined.append(first_copy)
        return torch.cat(joined, dim=self.dim)

    def cut(self, tensor: torch.Tensor, *, rank: int, num_ranks: int, what: str) -> torch.Tensor:
        """Join the rank's blocks, with zeros for padding."""
        self._refuse_missing_dim(tensor, what=what)
        # Without a list, rank r holds block r.
        blocks = self.blocks or tuple(range(num_ranks))
        num_held = Sharded(dim=self.dim, blocks=blocks)._blocks_per_rank(num_ranks, what=what)
        num_blocks = len(set(blocks) - {None})
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
        held = [
            padding if number is None else tensor.narrow(self.dim, number * width, width)
            for number in blocks[rank * num_held : (rank + 1) * num_held]
        ]
        return torch.cat(held, dim=self.dim)

    def _copies_by_block(
        self, pieces: Sequence[torch.Tensor], *, what: str
    ) -> dict[int, list[tuple[int, torch.Tensor]]]:
        """Return each block's copies by the block's number; a copy comes with the rank that holds it."""
        num_held = self._blocks_per_rank(len(pieces), what=what)
        size = pieces[0].shape[self.dim]
        if size % num_held:
            raise TargetError(
                f"{what} does not divide into the blocks of {self}",
                expected=f"a multiple of {num_held} along dim {self.dim} on every rank",
                found=str(list(pieces[0].shape)),
                next_step="Name as many blocks as the ranks hold.",
            )
        width = size // num_held
        copies: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for index, number in enumerate(self.blocks):
            if number is None:
                continue
            # The blocks are listed rank after rank, `num_held` for each.
            rank, position = divmod(index, num_held)
            block = pieces[rank].narrow(self.dim, position * width, width)
            copies.setdefault(number, []).append((rank, block))
        return copies

    def _blocks_per_rank(self, num_ranks: int, *, what: str) -> int:
        """Return the number of blocks that each rank holds, padding included."""
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
    """Parse the text after the `@`; raise TargetError if it has none of the forms above."""
    if text == "replicate":
        return Replicated()
    if text == "partial":
        return Partial()
    match = _SHARD_FORM.fullmatch(text)
    try:
        if match is not None:
            return Sharded(dim=int(match["dim"]), blocks=_parse_blocks(match["blocks"]))
    except ValueError:
        # The form lets through lists such as `0,,1` or `1-`, which hold no numbers.
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


def _are_equal_and_nonzero(pieces: Sequence[torch.Tensor]) -> bool:
    return bool(pieces[0].any()) and all(torch.equal(pieces[0], piece) for piece in pieces[1:])


def _refuse_unequal(copies: Sequence[tuple[int, torch.Tensor]], *, what: str) -> None:
    """Raise if copies of one shape, each with its rank, differ in any bit."""
    first_rank, first = copies[0]
    differing = [(rank, copy) for rank, copy in copies if not are_equal_bits(copy, first)]
    if differing:
        ranks = sorted({rank for rank, _ in differing})
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        largest = max(float((copy.double() - first.double()).abs().max()) for _, copy in differing)
        raise TargetError(
            f"{what} is not the same on all ranks",
            expected=f"what rank {first_rank} has, bit for bit",
            found=f"other values on {named}, the largest difference {largest:.3g}",
            next_step="If these are sums that each rank has a part of, a reduction is missing, or the site is "
            "@partial; if they are parts of the tensor, it is @shard(dim).",
        )


def are_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Decide whether two tensors have one shape and dtype and the same bits: a NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    as_bytes = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*as_bytes)


_NOTATION = re.compile(
    r"(?P<path>[^:@\[\]]*)"
    r"(:(?P<point>input|output)(\[(?P<element>[^\]:]+)\])?)?"
    r"(\[(?P<start>\d+):(?P<stop>\d+)\])?"
    r"(@(?P<layout>.+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceNotation:
    """The parts of such a text."""

    path: str  # path of the module; empty for the module itself
    point: str = "output"  # `input` or `output`
    element: str | None = None  # index or name among several; None if the text does not say
    part: tuple[int, int] | None = None  # start and stop along the last dim; None for all of it
    layout: SiteLayout | None = None  # layout of the ranks' pieces; None if the text does not say

    @classmethod
    def parse(cls, text: str, *, example: str) -> PlaceNotation:
        """Read a text; `example` shows the errors' reader a right one.

        Raises:
            UsageError: The text cannot be read.
        """
        match = _NOTATION.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"the place {text!r} cannot be read", expected=example)
        part = (int(match["start"]), int(match["stop"])) if match["start"] else None
        if part is not None and part[0] >= part[1]:
            raise UsageError(f"the place {text!r} takes nothing: its part ends before it begins")
        try:
            layout = parse_layout(match["layout"]) if match["layout"] else None
        except TargetError as error:
            raise UsageError(
                f"the place {text!r} cannot be read: {error.what}", expected=error.expected
            ) from error
        return cls(
            path=match["path"].strip(),
            point=match["point"] or "output",
            element=match["element"],
            part=part,
            layout=layout,
        )
