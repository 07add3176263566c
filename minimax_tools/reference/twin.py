"""Float32Twin: transformers' decoder layer in float32, run on the BF16 layer's own input.

The difference between the BF16 layer and its twin is what BF16 alone costs: the noise floor. `run` can be given the
golden's experts, since another choice is no rounding error. Weights are upcast when they are needed and dropped again,
so no float32 copy of a whole layer ever exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.model.weight_names import ATTENTION_MATRICES, EXPERTS
from minimax_tools.reference.transformers_layer import TransformersLayer
from minimax_tools.reference.upcast import upcast_experts

if TYPE_CHECKING:
    from transformers import MiniMaxM2Config

_ATTN_IMPLEMENTATION = "sdpa"
# Name under which transformers finds `_upcast_experts`.
_EXPERTS_IMPLEMENTATION = "mm2_upcast"
# Attribute of transformers' experts module that holds the layer's weights.
_TENSORS = "mm2_tensors"


class Float32Twin(TransformersLayer):
    """The float32 twin of one layer.

    `tensors` are the layer's weights by the hub's relative names, in the dtype that the golden computes in; `config` is
    transformers' config of the checkpoint.
    """

    def __init__(
        self,
        config: MiniMaxM2Config,
        tensors: Mapping[str, torch.Tensor],
        *,
        layer: int,
        device: torch.device,
    ) -> None:
        super().__init__(_twin_config(config), layer=layer, device=device, dtype=torch.float32)
        norms_and_router = {
            name: tensors[name] for name in tensors if EXPERTS not in name and name not in ATTENTION_MATRICES
        }
        self.bind(norms_and_router, dtype=torch.float32)
        for name in ATTENTION_MATRICES:
            _upcast_on_use(self.module, name, tensors, device)
        # `_upcast_experts` finds the weights there.
        setattr(self.module.get_submodule("mlp.experts"), _TENSORS, tensors)


def _twin_config(config: MiniMaxM2Config) -> MiniMaxM2Config:
    """Return a copy of the config that names `_upcast_experts`, which is registered with transformers here."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS_IMPLEMENTATION, _upcast_experts)
    twin = type(config).from_dict(config.to_dict())
    twin._attn_implementation = _ATTN_IMPLEMENTATION
    twin._experts_implementation = _EXPERTS_IMPLEMENTATION
    return twin


def _upcast_on_use(
    layer: torch.nn.Module, name: str, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Give one of attention's projections its float32 weight just before it runs, and take it back afterwards."""
    projection = layer.get_submodule(name.removesuffix(".weight"))
    meta_weight = projection.get_parameter("weight")

    def bind(module: torch.nn.Module, _: Any) -> None:
        weight = tensors[name].to(device, torch.float32)
        module._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)

    def strip(module: torch.nn.Module, *_: Any) -> None:
        module._parameters["weight"] = meta_weight

    projection.register_forward_pre_hook(bind)
    projection.register_forward_hook(strip)


def _upcast_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Run a layer's experts in float32, with the arguments that transformers gives an experts implementation."""
    tensors: Mapping[str, torch.Tensor] = getattr(module, _TENSORS)
    return upcast_experts(tensors, hidden_states, top_k_index, top_k_weights)
