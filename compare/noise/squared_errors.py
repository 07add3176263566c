"""Squares: squared norms of token rows, the massive channels apart from the ordinary ones.

T tokens, F channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Below the square of any float32, so that a division by a sum of squares is never one by 0.
TINY = 1e-300
# Likewise for float32 sums, which cannot hold the number above.
TINY_FLOAT32 = 1e-30
_BLOCK_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Squares:
    """Squared norms per token [T], float64, over the ordinary channels and over the massive ones."""

    ordinary: torch.Tensor
    massive: torch.Tensor

    @classmethod
    def of(cls, *, ordinary: torch.Tensor, massive: torch.Tensor) -> Squares:
        """Square norms, both [T]."""
        return cls(ordinary=ordinary.double().square(), massive=massive.double().square())

    @property
    def whole(self) -> torch.Tensor:
        """Squared norms over all channels, [T]."""
        return self.ordinary + self.massive

    def select(self, tokens: torch.Tensor) -> Squares:
        """Select some tokens, bool [T]."""
        return Squares(ordinary=self.ordinary[tokens], massive=self.massive[tokens])

    def put(self, tokens: torch.Tensor, other: Squares) -> Squares:
        """Replace the values at some tokens, bool [T], by the other's [t]."""
        ordinary, massive = self.ordinary.clone(), self.massive.clone()
        ordinary[tokens], massive[tokens] = other.ordinary, other.massive
        return Squares(ordinary=ordinary, massive=massive)

    def plus(self, other: Squares, *, factor: torch.Tensor | float) -> Squares:
        """Return this and `factor` (of each token, [T]) times the other; never below 0."""
        return Squares(
            ordinary=(self.ordinary + factor * other.ordinary).clamp(min=0.0),
            massive=(self.massive + factor * other.massive).clamp(min=0.0),
        )

    def times(self, factor: torch.Tensor) -> Squares:
        """Return `factor` (of each token, [T]) times this."""
        return Squares(ordinary=factor * self.ordinary, massive=factor * self.massive)

    def widest(self, other: Squares) -> Squares:
        """Return the larger of both, token by token."""
        return Squares(
            ordinary=torch.maximum(self.ordinary, other.ordinary),
            massive=torch.maximum(self.massive, other.massive),
        )


def square_rows(rows: torch.Tensor, *, massive: torch.Tensor) -> Squares:
    """Sum the squares of the rows [T,F]; the channels `massive`, bool [F], are massive."""
    return _sum_squares(rows, None, massive)


def square_difference(reference: torch.Tensor, target: torch.Tensor, *, massive: torch.Tensor) -> Squares:
    """Sum the squares of target − reference, both [T,F]; the channels `massive`, bool [F], are massive."""
    return _sum_squares(target, reference, massive)


def _sum_squares(rows: torch.Tensor, origin: torch.Tensor | None, massive: torch.Tensor) -> Squares:
    """Sum squares a block of rows at a time: the float64 copies never exceed one."""
    ordinary_parts, massive_parts = [], []
    # Mostly no channel is massive: then none is picked out, which takes longer than the sums.
    ordinary = ~massive if bool(massive.any()) else slice(None)
    for start in range(0, rows.shape[0], _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS].double()
        if origin is not None:
            block = block - origin[start : start + _BLOCK_ROWS].double()
        squares = block.square_()
        ordinary_parts.append(squares[:, ordinary].sum(dim=-1))
        massive_parts.append(squares[:, massive].sum(dim=-1))
    return Squares(ordinary=torch.cat(ordinary_parts), massive=torch.cat(massive_parts))
