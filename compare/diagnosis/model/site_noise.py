"""SiteNoise: the noise of a site outside the layers, the unit of its errors. T judged tokens, F channels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compare.noise.squared_errors import TINY_FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SiteNoise:
    """Noise at a site, by channel."""

    variance: torch.Tensor  # mean square of the golden's error, at least that of one rounding: float32 [F]
    size: torch.Tensor  # mean square of the golden's values, float32 [F]

    @classmethod
    def measure(cls, golden: torch.Tensor, exact: torch.Tensor, *, rounding: float) -> SiteNoise:
        """Measure the noise of the golden's values against `exact` ones, float32 from the golden's inputs: [T,F] each.

        `rounding` is the relative error of one rounding.
        """
        size = golden.square().mean(dim=0)
        # The mean over channels bounds it from below: a channel may be zero on all of these tokens.
        least = rounding**2 * torch.maximum(size, 1e-4 * size.mean()) + TINY_FLOAT32
        return cls(variance=torch.maximum((golden - exact).square().mean(dim=0), least), size=size)

    def widened(self, prediction: torch.Tensor) -> torch.Tensor:
        """Return the noise's variance [F] on values as large as a prediction [T,F]: larger values round coarser."""
        growth = prediction.square().mean(dim=0) / self.size.clamp(min=TINY_FLOAT32)
        # The upper bound is for channels in which the golden is 0: float32 could not hold their growth.
        return self.variance * growth.clamp(min=1.0, max=1e12)

    def rho(self, port: torch.Tensor, prediction: torch.Tensor) -> float:
        """Return ρ of the port's values [T,F] against a prediction; 1 is as good as the golden.

        Tokens without a prediction, NaN, are left out.
        """
        is_predicted = prediction.isfinite().all(dim=-1)
        if not bool(is_predicted.any()):
            return math.inf
        port, prediction = port[is_predicted], prediction[is_predicted]
        squares = (port - prediction).square() / self.widened(prediction)
        mean = float(squares.double().mean())
        return math.sqrt(mean) if math.isfinite(mean) else math.inf
