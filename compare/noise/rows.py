"""Rows: the judged tokens of one site on both sides, with the golden's noise floor.

T judged tokens, F channels of the site. `Squares` are squared norms per token, of ordinary and massive channels apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from compare.noise.input_error import InputError
from compare.noise.squared_errors import TINY, Squares, square_difference
from minimax_tools.metrics.error_sums import ErrorSums, sum_errors


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
