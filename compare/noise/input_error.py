"""InputError: the error of a chained layer's input, relative to the golden's input.

It widens the noise floor of all that is computed from it. T tokens, F channels.
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

    Of all channels or of the ordinary ones alone, whichever is more: massive channels would hide the rest.

    Args:
        overall: Over all tokens.
        tokens: Of each token, float64 [T]: a flipped expert upsets its own token far more than the others.
    """

    overall: float
    tokens: torch.Tensor

    @property
    def is_finite(self) -> bool:
        """True where the input holds no NaN or Inf."""
        return math.isfinite(self.overall)

    @property
    def widest(self) -> torch.Tensor:
        """Error that each token may suffer from, [T]: its own, or that of the tokens that it attends to."""
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
