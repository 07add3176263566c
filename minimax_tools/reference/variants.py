"""Variants: samples of how far right ways to compute a decoder layer in BF16 stray from its float32 twin.

Right implementations round in different places. A golden measures the effect on its own model and prompts: one variant
rounds to nearest wherever some right implementation rounds, others are off by random half steps there. A port is held,
at each site and token, against the variant that strays furthest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.rounded_layer import RoundedLayer
from minimax_tools.reference.rounding import RoundingKind

# How many a golden measures unless it is told otherwise.
DEFAULT_NUM_VARIANTS = 2
MOST_VARIANTS = 8
_NEAREST = "nearest"


def variant_names(number: int) -> tuple[str, ...]:
    """Return the names of so many variants: `nearest`, `random_1`, `random_2` and so on."""
    return tuple(_NEAREST if draw == 0 else f"random_{draw}" for draw in range(number))


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
        names: As `variant_names` gives them.
        hidden_states: [B,S,H], the golden's own input, where the layer is to be computed.
        inputs: Mask and positions.
        spec: The model.
        tensors: The layer's weights by the hub's relative names.
        router_experts: int64 [B,S,k], the golden's choice: a near-tie that flips is no rounding error.
        layer: The layer's number, which seeds what is random.

    Returns:
        By name every site but the input, float32 where it was computed.
    """
    kinds = tuple(RoundingKind.NEAREST if name == _NEAREST else RoundingKind.RANDOM for name in names)
    computed = RoundedLayer(spec, tensors, kinds=kinds, seed=layer).run(
        hidden_states, inputs, router_experts=router_experts
    )
    return dict(zip(names, computed, strict=True))
