"""Rows: the judged tokens [T,F] of one site on both sides, with the golden's noise floor.

Squares are squared norms per token, apart for ordinary and massive channels: the error of the latter, whose RMS is over
20 times the median channel's, would hide the others'. InputError is the error of a chained layer's input, which widens
the floor of each of its sites, so that the layer is not blamed for it. T judged tokens, F channels of the site.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from minimax_tools.metrics.error_sums import ErrorSums, square_by_token, sum_errors
from minimax_tools.metrics.noise_floor import massive_channels

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputError:
    """‖target − reference‖ / ‖reference‖ of a layer's input.

    It is the larger of two: over all channels, and over the ordinary ones, whose error massive channels would hide.
    """

    overall: float  # the error over all tokens
    tokens: torch.Tensor  # the error of each token, float64 [T]: a flip upsets its own token the most

    @property
    def is_finite(self) -> bool:
        """True if the input holds no NaN or Inf."""
        return math.isfinite(self.overall)

    @property
    def inherited(self) -> torch.Tensor:
        """Relative error that each token may inherit, [T]: its own, or `overall` from the tokens it attends to."""
        return self.tokens.clamp(min=self.overall)

    def select(self, tokens: torch.Tensor) -> InputError:
        """Select some tokens, bool [T]."""
        return InputError(overall=self.overall, tokens=self.tokens[tokens])


def measure_input_error(reference: torch.Tensor, target: torch.Tensor) -> InputError:
    """Measure the error of an input [T,F] against the golden's."""
    massive = massive_channels(reference)
    error = square_difference(reference, target, massive=massive)
    norm = square_rows(reference, massive=massive)
    overall = _relative(_total(error), _total(norm))
    return InputError(overall=float(overall), tokens=_relative(error, norm))


def _relative(error: Squares, norm: Squares) -> torch.Tensor:
    whole = error.whole / norm.whole.clamp(min=TINY)
    ordinary = error.ordinary / norm.ordinary.clamp(min=TINY)
    return torch.maximum(whole, ordinary).sqrt()


def _total(squares: Squares) -> Squares:
    return Squares(ordinary=squares.ordinary.sum(), massive=squares.massive.sum())


class BothErrors(NamedTuple):
    """Sums of the golden's and of the port's errors against the float32 twin."""

    golden: ErrorSums
    port: ErrorSums


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Judged tokens of one site on both sides, with the noise floor.

    Variants are other right ways to round the layer, measured with the golden. What is not known is None.
    """

    reference: torch.Tensor  # [T,F], the golden
    target: torch.Tensor  # [T,F], the port
    massive: torch.Tensor  # bool [F], the massive channels, over all real tokens of the golden
    places: torch.Tensor  # int64 [T,2], sequence of the batch and position of each token
    twin: torch.Tensor | None = None  # [T,F] float32, the golden's float32 twin; None if it was not kept
    floor: Squares | None = None  # (reference − twin)² summed per token; None if only the twin is known
    # (golden or variant − twin)² summed per token, the largest of them; None if the golden has no variants
    widened_floor: Squares | None = None
    # Averages of the variants' errors (gains, offset, worst channel), each divided by the golden's average, in the
    # order of `Structure.figures`
    variant_averages: tuple[float, ...] | None = None
    input_error: InputError | None = None  # error of a chained layer's input; None in isolated runs
    stored_dtype: torch.dtype | None = None  # dtype of the stored golden; None if that of `reference`
    # Roundings, one behind the other, by which a right port may hold in BF16 what the golden holds in float32.
    num_roundings: int = 1
    # Errors of these very values; None if they were not measured. Rows with other values must not keep them.
    errors: BothErrors | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the golden's stored values."""
        return self.stored_dtype or self.reference.dtype

    @property
    def num_tokens(self) -> int:
        """Number of judged tokens, T."""
        return self.reference.shape[0]

    @property
    def has_floor(self) -> bool:
        """True if ρ can be computed; without the twin it is estimated."""
        return self.twin is not None or self.floor is not None

    def measure_errors(self) -> BothErrors | None:
        """Return the sums of both sides' errors, measured in one pass if they are not known; None without a twin."""
        if self.errors is not None or self.twin is None:
            return self.errors
        return BothErrors(*sum_errors(self.reference, self.target, exact=self.twin, massive=self.massive))

    def select(self, tokens: torch.Tensor) -> Rows:
        """Select tokens, bool [T]; the massive channels stay."""
        return replace(
            self,
            reference=self.reference[tokens],
            target=self.target[tokens],
            places=self.places[tokens],
            twin=None if self.twin is None else self.twin[tokens],
            floor=None if self.floor is None else self.floor.select(tokens),
            widened_floor=None if self.widened_floor is None else self.widened_floor.select(tokens),
            input_error=None if self.input_error is None else self.input_error.select(tokens),
            errors=None,
        )

    def of_channels(self, channels: torch.Tensor) -> Rows:
        """Select channels, bool [F], of rows with a twin; variants widen their floor as they widen that of all."""
        if self.twin is None:
            raise ValueError("the floor of some channels needs the twin")
        golden, twin, massive = self.reference[:, channels], self.twin[:, channels], self.massive[channels]
        widened = None
        if self.widened_floor is not None:
            own = square_difference(twin, golden, massive=massive)
            whole = square_difference(self.twin, self.reference, massive=self.massive).whole
            widened = own.times((self.widened_floor.whole.sum() / whole.sum().clamp(min=TINY)).clamp(min=1.0))
        return replace(
            self,
            reference=golden,
            target=self.target[:, channels],
            twin=twin,
            massive=massive,
            floor=None,
            widened_floor=widened,
            variant_averages=None,
            errors=None,
        )
