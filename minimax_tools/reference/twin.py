"""Float32Twin: transformers' decoder layer in float32, on the BF16 layer's own input.

Its experts are upcast one at a time as they are needed, so no float32 copy of a whole layer ever exists.
The difference between the BF16 layer and its twin is what BF16 alone costs: the noise floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import ATTENTION_MATRICES, EXPERTS
from minimax_tools.reference.transformers_layer import TransformersLayer
from minimax_tools.reference.upcast import upcast_experts

if TYPE_CHECKING:
    from transformers import MiniMaxM2Config

_ATTN_IMPLEMENTATION = "sdpa"
_EXPERTS_IMPLEMENTATION = "mm2_upcast"
_TENSORS = "mm2_tensors"


class Float32Twin:
    """The float32 twin of one layer.

    Args:
        config: transformers' config of the checkpoint; it is not changed.
        tensors: The layer's weights by the hub's relative names, in the dtype that the reference computes in.
        layer: The layer's number.
        device: Where to compute.
    """

    def __init__(
        self,
        config: MiniMaxM2Config,
        tensors: Mapping[str, torch.Tensor],
        *,
        layer: int,
        device: torch.device,
    ) -> None:
        self._layer = TransformersLayer(_twin_config(config), layer=layer, device=device)
        module = self._layer.module
        # Norms and router.
        small = {
            name: tensors[name] for name in tensors if EXPERTS not in name and name not in ATTENTION_MATRICES
        }
        self._layer.bind(small, dtype=torch.float32)
        for name in ATTENTION_MATRICES:
            _upcast_on_use(module, name, tensors, device)
        setattr(module.get_submodule("mlp.experts"), _TENSORS, tensors)

    def run(
        self,
        hidden_states: torch.Tensor,
        inputs: Inputs,
        *,
        router_experts: torch.Tensor | None,
        sites: tuple[Site, ...],
    ) -> dict[Site, torch.Tensor]:
        """Run the layer in float32 and return its sites on the CPU.

        Args:
            hidden_states: [B,S,H], the reference's own input in its dtype.
            inputs: Mask and positions.
            router_experts: int64 [B,S,k], the reference's expert choice, replayed by the experts so that
                a flipped near-tie does not count as arithmetic noise; None to let the twin choose.
            sites: Sites to return. `router_experts` is the twin's own choice; `router_weights` are the
                weights of the choice that was replayed, in its order.
        """
        return self._layer.run(
            hidden_states.to(torch.float32), inputs, router_experts=router_experts, sites=sites
        )


def _twin_config(config: MiniMaxM2Config) -> MiniMaxM2Config:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS_IMPLEMENTATION, _upcast_experts)
    twin = type(config).from_dict(config.to_dict())
    twin._attn_implementation = _ATTN_IMPLEMENTATION
    twin._experts_implementation = _EXPERTS_IMPLEMENTATION
    return twin


def _upcast_on_use(
    layer: torch.nn.Module, name: str, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Give one of attention's projections its float32 weight while it runs, and no longer."""
    projection = layer.get_submodule(name.removesuffix(".weight"))
    bare = projection.get_parameter("weight")

    def bind(module: torch.nn.Module, _: Any) -> None:
        weight = tensors[name].to(device, torch.float32)
        module._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)

    def strip(module: torch.nn.Module, *_: Any) -> None:
        module._parameters["weight"] = bare

    projection.register_forward_pre_hook(bind)
    projection.register_forward_hook(strip)


def _upcast_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Run transformers' eager experts, each expert's weights upcast while it computes and then dropped."""
    tensors: Mapping[str, torch.Tensor] = getattr(module, _TENSORS)
    return upcast_experts(tensors, hidden_states, top_k_index, top_k_weights)
