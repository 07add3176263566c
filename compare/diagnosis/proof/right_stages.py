"""RightStages: the right values of a layer's stages, in float32, from the port's own inputs of them.

B batch, S sequence, T real tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from compare.diagnosis.evaluation import Evaluation, LayerInputs, finite_padding, spread_mask, with_given
from compare.diagnosis.layer_weights import LayerWeights
from compare.diagnosis.proof.stage_cut import sites_behind
from compare.sides.golden_weights import GoldenWeights
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import has_all_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RightStages:
    """Stages of the right layer on one batch; no token is decoded."""

    inputs: LayerInputs

    @classmethod
    def of(cls, weights: GoldenWeights, inputs: Inputs) -> RightStages:
        """Build the stages of a layer from its weights and the batch."""
        return cls(
            inputs=LayerInputs(
                spec=weights.spec,
                weights=LayerWeights(weights.tensors),
                attention_mask=inputs.attention_mask,
                position_ids=inputs.position_ids,
                decode_start=inputs.sequence_length,
            )
        )

    def value(self, site: Site, shown: Mapping[Site, torch.Tensor]) -> torch.Tensor:
        """Return the right values of a site, [B,S,…] in the port's dtype; padding keeps what the port gave.

        `shown` has the port's values, [B,S,…]: of the site itself, of the layer's input, and of any others. Those that
        do not follow from the site stand in for their stages; what is missing between them is computed.
        """
        port = shown[site]
        mask = self.inputs.attention_mask
        behind = sites_behind([site])
        given = {
            source: finite_padding(value, source, mask)
            for source, value in shown.items()
            if source is not site and source not in behind
        }
        tokens = self.inputs.judged_tokens
        with torch.no_grad():
            right = Evaluation(self.inputs, with_given(given), tokens=tokens)[site].to(port.dtype)
        if has_all_tokens(site):
            return torch.where(spread_mask(mask, site).bool(), right, port)
        flat = port.flatten(0, 1).clone()
        flat[tokens] = right
        filled: torch.Tensor = flat.unflatten(0, tuple(mask.shape))
        return filled
