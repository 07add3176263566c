"""Variants: samples of the error that a correct BF16 implementation of a decoder layer may have.

Correct implementations round in different places. The variant `nearest` rounds to BF16 wherever any correct
implementation rounds; `random_1`, `random_2` … move the values there by up to half a BF16 step. A golden computes the
variants on its own prompts. A port may be as far from the float32 twin as the farthest variant, at each site and token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.rounded_layer import RoundedLayer
from minimax_tools.reference.rounding import RoundingKind
from minimax_tools.reference.variant_names import NEAREST


def run_variants(
    names: tuple[str, ...],
    hidden_states: torch.Tensor,
    inputs: Inputs,
    *,
    spec: ModelSpec,
    tensors: Mapping[str, torch.Tensor],
    router_experts: torch.Tensor,
    layer: int,
) -> Mapping[str, Mapping[Site, torch.Tensor]]:
    """Compute the variants of one layer side by side.

    Args:
        names: Names from `variant_names.variant_names`.
        hidden_states: The golden's input of the layer [B,S,H], on the device to compute on.
        inputs: The batch, for its mask and positions.
        spec: The model.
        tensors: The layer's weights by the hub's relative names.
        router_experts: int64 [B,S,k], the golden's choice, which all variants replay: a flip is no rounding error.
        layer: The layer's number, which is the seed of the random steps.

    Returns:
        For each variant by name, every site but the input, float32 on the same device; `router_experts`, int64, is the
            variant's own choice, not the replayed one.
    """
    kinds = tuple(RoundingKind.NEAREST if name == NEAREST else RoundingKind.RANDOM for name in names)
    computed = RoundedLayer(spec, tensors, kinds=kinds, seed=layer).run(
        hidden_states, inputs, router_experts=router_experts
    )
    return dict(zip(names, computed, strict=True))
