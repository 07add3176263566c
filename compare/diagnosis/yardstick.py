"""Yardstick: the noise of BF16 at a site, for each token and channel, and a prediction's distance in units of it.

T tokens, F channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compare.noise.squared_errors import TINY_FLOAT32

# Errors of BF16 relative to what is added to a stream, of several roundings: they grow with it.
_GROWTH = {torch.bfloat16: 6e-3, torch.float32: 1e-6}
_LEAST_SHARE = 1e-3
# Of the judged tokens, those that are worst by any prediction: a near tie of experts that flipped unforeseen.
_TRIMMED_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Yardstick:
    """A site on both sides, and its noise.

    Args:
        port: float32 [T,F], what the port gave.
        golden: float32 [T,F], what the golden gave.
        exact: float32 [T,F], the layer in float32.
        variance: float32 [T,F], the noise that BF16 puts there.
        dtype: What the golden computes in.
    """

    port: torch.Tensor
    golden: torch.Tensor
    exact: torch.Tensor
    variance: torch.Tensor
    dtype: torch.dtype

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
        """Build the yardstick of a site; `settled`, bool [T], are the tokens whose experts no noise changes."""
        squares = (golden - exact).square()
        return cls(
            port=port,
            golden=golden,
            exact=exact,
            variance=_fit_variance(squares, settled if bool(settled.any()) else torch.ones_like(settled)),
            dtype=dtype,
        )

    def at(self, places: torch.Tensor) -> Yardstick:
        """Select some tokens."""
        return Yardstick(
            port=self.port[places],
            golden=self.golden[places],
            exact=self.exact[places],
            variance=self.variance[places],
            dtype=self.dtype,
        )

    def widened(self, growth: torch.Tensor) -> torch.Tensor:
        """Return the variance [T,F] where what is added has grown by `growth`, squared norms [T]."""
        added = _GROWTH[self.dtype] ** 2 * growth.clamp(min=0.0) / self.port.shape[1]
        return self.variance + added[:, None]

    def misfit(self, prediction: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """Return the mean over the channels of (port - prediction)², in units of the variance: float64 [T]."""
        return ((self.port - prediction).square() / variance).double().mean(-1)

    def project(
        self, prediction: torch.Tensor, variance: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return port's error times the predicted one, the predicted one squared, the port's squared: float64 [T].

        The port's error is taken from the golden, whose roundings it shares.
        """
        predicted = prediction - self.exact
        error = self.port - self.golden
        return (
            (error * predicted / variance).double().sum(-1),
            (predicted.square() / variance).double().sum(-1),
            (error.square() / variance).double().sum(-1),
        )


def trimmed_mean(values: torch.Tensor) -> float:
    """Return the mean without the largest few; infinity where there is none, or one is not finite."""
    if not values.numel():
        return float("inf")
    num_kept = max(len(values) - int(_TRIMMED_SHARE * len(values) + 0.999), 1)
    kept = values.nan_to_num(nan=torch.inf).sort().values[:num_kept]
    return float(kept.mean())


def _fit_variance(squares: torch.Tensor, settled: torch.Tensor) -> torch.Tensor:
    """Fit squared errors by a channel's share times a token's size: each is seen too seldom by itself."""
    of_channel = squares[settled].mean(0)
    of_channel = of_channel.clamp(min=_LEAST_SHARE * float(of_channel.median()) + TINY_FLOAT32)
    of_token = (squares / of_channel).mean(-1)
    typical = float(of_token[settled].median())
    # Where the golden's own experts flipped, its error is no noise.
    of_token = torch.where(settled, of_token, typical).clamp(min=_LEAST_SHARE * typical + TINY_FLOAT32)
    return of_token[:, None] * of_channel
