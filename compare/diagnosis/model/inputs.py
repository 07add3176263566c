"""ModelInputs: what the sites outside the layers, right or mistaken, are computed from.

T judged tokens, H hidden, C judged columns of the vocabulary, F channels of a site: H, or C at the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from compare.diagnosis.model.weights import ModelWeights
from minimax_tools.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """Inputs of one side, the golden's or the port's, to the sites outside the layers.

    Args:
        spec: Quantities of the model.
        weights: Tensors of the checkpoint outside the layers.
        columns: Columns of the vocabulary that are judged, ascending: int64 [C].
        dtype: Dtype that the golden computes in.
        token_ids: Ids of the judged tokens, int64 [T].
        before: Index of the preceding token of the same prompt among all real tokens; -1 for the first: int64 [T].
        all_ids: Ids of all real tokens, int64.
        states: Output of the last layer, float32 [T,H]; None if it is not held.
        normed: Output of the final norm, float32 [T,H]; None if it is not held.
        all_normed: Output of the final norm for all real tokens, float32; None if it is not held.
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
        """Round values to the golden's dtype; return them as float32."""
        return values.to(self.dtype).float()

    def without_first(self, values: torch.Tensor) -> torch.Tensor:
        """Replace [T,F] by NaN at each prompt's first token, which has no token before it."""
        return values.masked_fill((self.before < 0)[:, None], math.nan)
