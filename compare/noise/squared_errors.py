"""Squares: the squared norm of each token's values, kept apart for massive channels and ordinary ones.

A massive channel's RMS is over 20 times the median channel's; its error would hide the errors of all others.

T tokens, F channels. A row is the values of one token, [F].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minimax_tools.metrics.error_sums import ErrorSums, square_by_token

# Lower bound of float64 divisors; below the square of any float32, so it changes no sum that is not 0.
TINY = 1e-300
# Lower bound of float32 divisors, which cannot hold the number above.
TINY_FLOAT32 = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Squares:
    """Squared norms per token [T], float64, over the ordinary channels and over the massive ones."""

    ordinary: torch.Tensor
    massive: torch.Tensor

    @classmethod
    def of(cls, *, ordinary: torch.Tensor, massive: torch.Tensor) -> Squares:
        """Square the norms of ordinary and of massive channels, [T] each."""
        return cls(ordinary=ordinary.double().square(), massive=massive.double().square())

    @classmethod
    def of_errors(cls, errors: ErrorSums) -> Squares:
        """Take the squares out of the sums of one side's errors."""
        return cls(ordinary=errors.squares, massive=errors.massive_squares)

    @classmethod
    def of_values(cls, errors: ErrorSums) -> Squares:
        """Take the squares of the side's values out of the sums of its errors."""
        return cls(ordinary=errors.value_squares, massive=errors.massive_value_squares)

    @property
    def whole(self) -> torch.Tensor:
        """Squared norms over all channels, [T]."""
        return self.ordinary + self.massive

    def select(self, tokens: torch.Tensor) -> Squares:
        """Select some tokens, bool [T]."""
        return Squares(ordinary=self.ordinary[tokens], massive=self.massive[tokens])

    def put(self, tokens: torch.Tensor, other: Squares) -> Squares:
        """Return a copy with the other's values [t] at t chosen tokens, bool [T]."""
        ordinary, massive = self.ordinary.clone(), self.massive.clone()
        ordinary[tokens], massive[tokens] = other.ordinary, other.massive
        return Squares(ordinary=ordinary, massive=massive)

    def plus(self, other: Squares, *, factor: torch.Tensor | float) -> Squares:
        """Return self + `factor` · other, at least 0; the factor may be negative: one number, or one per token [T]."""
        return Squares(
            ordinary=(self.ordinary + factor * other.ordinary).clamp(min=0.0),
            massive=(self.massive + factor * other.massive).clamp(min=0.0),
        )

    def times(self, factor: torch.Tensor | float) -> Squares:
        """Return these squares times `factor`, one number or one per token [T]."""
        return Squares(ordinary=factor * self.ordinary, massive=factor * self.massive)

    def maximum(self, other: Squares) -> Squares:
        """Return the larger of both, token by token."""
        return Squares(
            ordinary=torch.maximum(self.ordinary, other.ordinary),
            massive=torch.maximum(self.massive, other.massive),
        )


def square_rows(rows: torch.Tensor, *, massive: torch.Tensor) -> Squares:
    """Sum the squares of the rows [T,F]; the channels `massive`, bool [F], are massive."""
    ordinary, of_massive = square_by_token(rows, None, massive=massive)
    return Squares(ordinary=ordinary, massive=of_massive)


def square_difference(reference: torch.Tensor, target: torch.Tensor, *, massive: torch.Tensor) -> Squares:
    """Sum the squares of target − reference, both [T,F]; the channels `massive`, bool [F], are massive."""
    ordinary, of_massive = square_by_token(target, reference, massive=massive)
    return Squares(ordinary=ordinary, massive=of_massive)
