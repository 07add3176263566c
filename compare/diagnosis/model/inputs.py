"""ModelInputs: what the sites outside the layers, right or mistaken, are computed from.

T judged tokens, H hidden, C judged columns of the vocabulary, F channels of a site: H, or C at the logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from compare.diagnosis.model.weights import ModelWeights
from minimax_tools.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """Inputs of one side, the golden's or the port's, to the sites outside the layers; a tensor not held is None.

    Judged are some of the real tokens (those that are not padding).
    """

    spec: ModelSpec
    weights: ModelWeights
    columns: torch.Tensor  # columns of the vocabulary that are judged, ascending: int64 [C]
    dtype: torch.dtype  # dtype that the golden computes in
    token_ids: torch.Tensor  # ids of the judged tokens, int64 [T]
    all_token_ids: torch.Tensor  # ids of all real tokens, int64
    previous: torch.Tensor  # index among all real tokens of the token before; -1 for none: int64 [T]
    # For a way to mistake tokens for others, in words: the other's index among all real tokens; -1 for none: int64 [T]
    exchanged: Mapping[str, torch.Tensor] = field(default_factory=dict)
    states: torch.Tensor | None = None  # output of the last layer, float32 [T,H]
    normed: torch.Tensor | None = None  # output of the final norm, float32 [T,H]
    all_normed: torch.Tensor | None = None  # output of the final norm for all real tokens, float32

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Round values to the golden's dtype; return them as float32."""
        return values.to(self.dtype).float()

    def of_others(self, values: torch.Tensor, order: str) -> torch.Tensor:
        """Return the values [T,F] of other tokens, from those of all real ones; NaN where the other is padding."""
        others = self.exchanged[order]
        return values[others].masked_fill((others < 0)[:, None], math.nan)

    def without_first_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Replace [T,F] by NaN at each prompt's first token, which has no token before it."""
        return values.masked_fill((self.previous < 0)[:, None], math.nan)
