"""Yardstick: the noise of BF16 at a site, by token and channel, and a prediction's distance in units of this noise.

T tokens, F channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from compare.noise.rows import TINY_FLOAT32
from minimax_tools.model.sites import Site

# Largest ρ of a right port at a site.
RIGHT_RHO = 2.0
# Largest ρ that a mistake may leave at a site, however large ρ was without it.
MOST_LEFT = 10.0
# Of settled tokens, whose experts stay the same under noise: fewer may all be near ties. The search begins with 8.
_FEWEST_TOKENS = 6
# Relative error of a value after several roundings, by dtype: where a mistake enlarges a value, its noise grows too.
_RELATIVE_NOISE = {torch.bfloat16: 6e-3, torch.float32: 1e-6}
# Least variance of a channel or token, as a share of the median one: one that happens to be exact is not free of noise.
_LEAST_SHARE = 1e-3
# Error of a choice of experts that counts as noise: one exchanged expert, which differs twice, in a hundred tokens.
_CHOICE_NOISE = 0.01 * 2
# Relative error of a routing weight that is held in BF16, as right ports may.
_WEIGHT_ROUNDING = 2**-9
# Share of the judged tokens that is left out, the worst ones: their experts may have flipped unforeseen in a near tie.
_TRIMMED_SHARE = 0.02


class Projection(NamedTuple):
    """Sums over a site's channels, float64 [T] each, from which amplitude and likeness of a mistake follow.

    e is the port's error and p the predicted one, both in units of the noise's standard deviation; r is what the
    prediction leaves of the port.
    """

    product: torch.Tensor  # Σ e·p
    rest: torch.Tensor  # Σ r·p
    predicted_energy: torch.Tensor  # Σ p²
    error_energy: torch.Tensor  # Σ e²


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Yardstick:
    """A site on both sides, and its noise."""

    port: torch.Tensor  # the port's values, float32 [T,F]
    golden: torch.Tensor  # the golden's values, float32 [T,F]
    exact: torch.Tensor  # values of the right layer in float32, with the experts that float32 chooses, [T,F]
    variance: torch.Tensor  # variance of the noise that BF16 causes in a right layer, float32 [T,F]
    dtype: torch.dtype  # dtype that the golden computes in

    @classmethod
    def of(
        cls,
        *,
        port: torch.Tensor,
        golden: torch.Tensor,
        exact: torch.Tensor,
        settled: torch.Tensor,
        dtype: torch.dtype,
    ) -> Yardstick:
        """Measure a site's noise on the tokens whose experts no noise changes, `settled`, bool [T], or on all."""
        squares = (golden - exact).square()
        variance = _fit_variance(squares, settled if bool(settled.any()) else torch.ones_like(settled))
        return cls(port=port, golden=golden, exact=exact, variance=variance, dtype=dtype)

    @classmethod
    def of_choice(
        cls,
        site: Site,
        *,
        port: torch.Tensor,
        golden: torch.Tensor,
        exact: torch.Tensor,
        settled: torch.Tensor,
    ) -> Yardstick:
        """Measure the noise of chosen experts, or of their weights, by expert [T,E] (see `choice_rows`)."""
        if site is Site.ROUTER_EXPERTS:
            variance = torch.full_like(exact, _CHOICE_NOISE / exact.shape[1])
            return cls(port=port, golden=golden, exact=exact, variance=variance, dtype=torch.float32)
        measured = cls.of(port=port, golden=golden, exact=exact, settled=settled, dtype=torch.float32)
        return replace(measured, variance=measured.variance + (_WEIGHT_ROUNDING * exact).square())

    def select_tokens(self, indices: torch.Tensor) -> Yardstick:
        """Select some tokens, by their indices among the T."""
        return replace(
            self,
            port=self.port[indices],
            golden=self.golden[indices],
            exact=self.exact[indices],
            variance=self.variance[indices],
        )

    def widened(self, growth: torch.Tensor) -> torch.Tensor:
        """Return the variance [T,F] for values whose squared norm grew by `growth` [T]: larger ones round coarser."""
        added = _RELATIVE_NOISE[self.dtype] ** 2 * growth.clamp(min=0.0) / self.port.shape[1]
        return self.variance + added[:, None]

    def misfit(self, prediction: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """Return the mean over the channels of (port - prediction)² / variance, the prediction's: float64 [T]."""
        return ((self.port - prediction).square() / variance).double().mean(-1)

    def project(self, prediction: torch.Tensor, variance: torch.Tensor) -> Projection:
        """Project the port's error on the error that a prediction [T,F] has; the `variance` is the prediction's."""
        # Prediction and `exact` are both float32. The port is held against the golden, and not against `exact`, since
        # both hold BF16: the roundings that they share cancel.
        predicted = prediction - self.exact
        error = self.port - self.golden
        return Projection(
            product=(error * predicted / variance).double().sum(-1),
            rest=((self.port - prediction) * predicted / variance).double().sum(-1),
            predicted_energy=(predicted.square() / variance).double().sum(-1),
            error_energy=(error.square() / variance).double().sum(-1),
        )


def is_enough(judged: torch.Tensor) -> bool:
    """Decide whether the judged tokens, bool [T], are enough to tell how well a prediction fits."""
    return int(judged.sum()) >= min(_FEWEST_TOKENS, len(judged))


def trimmed_mean(values: torch.Tensor) -> float:
    """Return the mean without the largest few; infinity if there are no values, or a kept one is not finite."""
    if not values.numel():
        return float("inf")
    # The number of values to leave out is rounded up; 2.0000001, a 2 that float arithmetic made larger, stays 2.
    num_kept = max(len(values) - int(_TRIMMED_SHARE * len(values) + 0.999), 1)
    kept = values.nan_to_num(nan=torch.inf, posinf=torch.inf).sort().values[:num_kept]
    return float(kept.mean())


def _fit_variance(squares: torch.Tensor, settled: torch.Tensor) -> torch.Tensor:
    """Fit the variance [T,F] as a factor per token times a factor per channel: one square is no measure by itself."""
    of_channel = squares[settled].mean(0)
    of_channel = of_channel.clamp(min=_LEAST_SHARE * float(of_channel.median()) + TINY_FLOAT32)
    of_token = (squares / of_channel).mean(-1)
    typical = float(of_token[settled].median())
    # If noise may flip a token's experts, the golden's may have flipped: its error there is not noise of BF16.
    of_token = torch.where(settled, of_token, typical).clamp(min=_LEAST_SHARE * typical + TINY_FLOAT32)
    return of_token[:, None] * of_channel
