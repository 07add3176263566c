"""InputError: how far the input of a chained layer is from the golden's.

In a chained run a layer's input is the output of the layer before, with its error. That error widens the noise floor of
every site of the layer, so that the layer is not blamed for it. T tokens, F channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compare.noise.squared_errors import TINY, Squares, square_difference, square_rows
from minimax_tools.metrics.noise_floor import massive_channels


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
