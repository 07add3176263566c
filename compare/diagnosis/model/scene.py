"""ModelScene: what a mistake outside the layers is computed from, and the unit of its error.

T judged tokens, H hidden, C judged columns of the vocabulary, F channels of a site: H, or C at the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compare.diagnosis.model.weights import ModelWeights
from compare.noise.squared_errors import TINY_FLOAT32
from minimax_tools.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelScene:
    """Input of one side to a site outside the layers.

    Args:
        weights: Its tensors outside the layers.
        columns: Columns of the vocabulary that are judged, ascending: int64 [C].
        token_ids: The tokens, int64 [T].
        before: The place of the token before each in its prompt, among all real tokens; -1 for the first: int64 [T].
        all_ids: All real tokens, int64.
        states: The last layer's output, float32 [T,H]; None where it is not held.
        normed: The final norm's output, float32 [T,H]; None where it is not held.
        all_normed: The same of all real tokens.
        dtype: What the golden computes in.
    """

    spec: ModelSpec
    weights: ModelWeights
    columns: torch.Tensor
    dtype: torch.dtype
    token_ids: torch.Tensor
    before: torch.Tensor
    all_ids: torch.Tensor
    states: torch.Tensor | None = None
    normed: torch.Tensor | None = None
    all_normed: torch.Tensor | None = None

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Round values as the golden's dtype holds them, float32."""
        return values.to(self.dtype).float()

    def but_first(self, values: torch.Tensor) -> torch.Tensor:
        """Replace [T,F] by NaN at each prompt's first token: nothing is known of the one before it."""
        return values.masked_fill((self.before < 0)[:, None], math.nan)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """Noise at a site, channel by channel.

    Args:
        variance: Mean square of the golden's own error, at least of one rounding: float32 [F].
        size: Mean square of the golden's values, float32 [F].
    """

    variance: torch.Tensor
    size: torch.Tensor

    @classmethod
    def of(cls, golden: torch.Tensor, exact: torch.Tensor, *, rounding: float) -> Unit:
        """Measure it.

        Args:
            golden: The golden's values, float32 [T,F].
            exact: What it computes them from gives in float32, [T,F].
            rounding: Relative error of one rounding.
        """
        size = golden.square().mean(dim=0)
        # A channel that is zero on these tokens has no size of its own.
        least = rounding**2 * torch.maximum(size, 1e-4 * size.mean()) + TINY_FLOAT32
        return cls(variance=torch.maximum((golden - exact).square().mean(dim=0), least), size=size)

    def widened(self, prediction: torch.Tensor) -> torch.Tensor:
        """Return the variance [F] of values as large as a prediction [T,F]: roundings grow with them."""
        growth = prediction.square().mean(dim=0) / self.size.clamp(min=TINY_FLOAT32)
        return self.variance * growth.clamp(min=1.0, max=1e12)

    def rho(self, port: torch.Tensor, prediction: torch.Tensor) -> float:
        """Return the port's error [T,F] against a prediction, in units of the noise; 1 is as good as the golden.

        Tokens of which nothing is predicted, NaN, are left out.
        """
        told = prediction.isfinite().all(dim=-1)
        if not bool(told.any()):
            return math.inf
        port, prediction = port[told], prediction[told]
        squares = (port - prediction).square() / self.widened(prediction)
        mean = float(squares.double().mean())
        return math.sqrt(mean) if math.isfinite(mean) else math.inf
