"""VariantLayer: transformers' decoder layer in the golden's dtype, computed as a variant says, fed the golden's input.

Weights stay where they lie: an expert is looked up when it runs, so a variant takes no copy of the layer.
T tokens, k experts per token, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear, silu

from minimax_tools.checkpoint.names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, EXPERTS, expert_weight
from minimax_tools.inputs import Inputs
from minimax_tools.reference.lone_layer import LoneLayer
from minimax_tools.reference.variants import Variant
from minimax_tools.sites import Site

if TYPE_CHECKING:
    from transformers import MiniMaxM2Config

_EXPERTS_IMPLEMENTATION = "mm2_variant"
_TENSORS = "mm2_tensors"
_NUM_PARTS = "mm2_num_parts"


class VariantLayer:
    """One layer, computed in another way than the golden's.

    Args:
        variant: The way.
        config: transformers' config of the checkpoint; it is not changed.
        tensors: The layer's weights by the hub's relative names, in the dtypes that the golden computes in.
        layer: The layer's number.
        device: Where to compute.
    """

    def __init__(
        self,
        variant: Variant,
        config: MiniMaxM2Config,
        tensors: Mapping[str, torch.Tensor],
        *,
        layer: int,
        device: torch.device,
    ) -> None:
        self._layer = LoneLayer(_variant_config(variant, config), layer=layer, device=device)
        module = self._layer.module
        self._layer.bind({name: tensors[name] for name in tensors if EXPERTS not in name})
        if variant.num_parts > 1:
            module.get_submodule("self_attn.o_proj").register_forward_hook(_in_parts(variant.num_parts))
        experts = module.get_submodule("mlp.experts")
        setattr(experts, _TENSORS, tensors)
        setattr(experts, _NUM_PARTS, variant.num_parts)

    def run(
        self,
        hidden_states: torch.Tensor,
        inputs: Inputs,
        *,
        router_experts: torch.Tensor,
        sites: tuple[Site, ...],
    ) -> dict[Site, torch.Tensor]:
        """Run the layer past the golden's expert choice, and return its sites on the CPU.

        Args:
            hidden_states: [B,S,H], the golden's own input in its dtype.
            inputs: Mask and positions.
            router_experts: int64 [B,S,k], the golden's expert choice: a near-tie that flips is no rounding error.
            sites: Sites to return, as of the float32 twin.
        """
        return self._layer.run(hidden_states, inputs, router_experts=router_experts, sites=sites)


def add_experts(
    weights: Mapping[str, torch.Tensor],
    states: torch.Tensor,
    experts: torch.Tensor,
    shares: torch.Tensor,
    *,
    num_parts: int,
) -> torch.Tensor:
    """Every token through its experts, whose outputs are added up in the states' dtype one after the other: [T,H].

    Args:
        weights: The layer's weights by the hub's relative names.
        states: [T,H].
        experts: int64 [T,k], each token's experts.
        shares: float32 [T,k], what each of them counts.
        num_parts: How many parts of the experts' inner width are added up apart, and together at the end.
    """
    totals = [torch.zeros_like(states) for _ in range(num_parts)]
    for number in experts.unique().tolist():
        tokens, positions = torch.where(experts == number)
        gate, up, down = (
            weights[expert_weight(number, name)].to(states.device)
            for name in (EXPERT_GATE, EXPERT_UP, EXPERT_DOWN)
        )
        activated = silu(linear(states[tokens], gate)) * linear(states[tokens], up)
        share = shares[tokens, positions, None]
        pieces = zip(activated.chunk(num_parts, dim=-1), down.chunk(num_parts, dim=-1), strict=True)
        for total, (part, columns) in zip(totals, pieces, strict=True):
            total.index_add_(0, tokens, (linear(part, columns) * share).to(total.dtype))
    return reduce(torch.add, totals)


def _variant_config(variant: Variant, config: MiniMaxM2Config) -> MiniMaxM2Config:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS_IMPLEMENTATION, _add_experts)
    other = type(config).from_dict(config.to_dict())
    other._attn_implementation = variant.attn_implementation
    other._experts_implementation = _EXPERTS_IMPLEMENTATION
    return other


def _in_parts(num_parts: int) -> Any:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        weight = module.get_parameter("weight")
        pieces = zip(inputs[0].chunk(num_parts, dim=-1), weight.chunk(num_parts, dim=-1), strict=True)
        return reduce(torch.add, (linear(part, columns) for part, columns in pieces))

    return hook


def _add_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    tensors: Mapping[str, torch.Tensor] = getattr(module, _TENSORS)
    num_parts: int = getattr(module, _NUM_PARTS)
    return add_experts(tensors, hidden_states, top_k_index, top_k_weights, num_parts=num_parts)
