"""Float32Twin: one decoder layer of transformers by itself, in float32.

The difference between the BF16 layer and its twin is what BF16 alone costs: the noise floor. Weights are upcast when
they are needed and dropped again, so no float32 copy of a whole layer ever exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.capture.recorder import Recorder, copy_to_host, shape_to_batch
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.router import Router
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import GATE, expected_layer_shapes, module_weights
from minimax_tools.reference.modules import LAYER_TAPS, modeling_class, recording_layer
from minimax_tools.reference.upcast import upcast_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_ATTN_IMPLEMENTATION = "sdpa"
# Name under which transformers finds `_upcast_experts`.
_EXPERTS_IMPLEMENTATION = "mm2_upcast"
# Attribute of transformers' experts module that holds the layer's weights.
_TENSORS = "mm2_tensors"


class Float32Twin:
    """The float32 twin of one decoder layer of transformers.

    `tensors` are the layer's weights by mm2's relative names, in the dtype that the golden computes in; `config` is
    transformers' config of the checkpoint.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        spec: ModelSpec,
        layer: int,
        device: torch.device,
    ) -> None:
        self._graph, self._router = spec.graph.layer(layer), Router.of(spec, tensors)
        self._config = _twin_config(config)
        self._device = device
        with torch.device("meta"):
            self._module: torch.nn.Module = modeling_class(spec.family, "DecoderLayer")(
                self._config, layer
            ).eval()
        self._rotary = modeling_class(spec.family, "RotaryEmbedding")(self._config).to(device)
        shapes = expected_layer_shapes(spec, layer)
        kept: dict[str, torch.Tensor] = {}
        for place, names in module_weights(spec, layer).items():
            if names == (GATE,) or len(shapes[names[0]]) == 1:
                kept[place] = tensors[names[0]].to(device, torch.float32)
            else:
                _upcast_on_use(self._module, place, names, tensors, device)
        # Not strict: the large matrices are given only while they are used.
        self._module.load_state_dict(kept, strict=False, assign=True)
        # `_upcast_experts` finds the weights there.
        if not self._graph.is_dense:
            setattr(self._module.get_submodule("mlp.experts"), _TENSORS, (tensors, spec.graph))

    def run(
        self,
        hidden_states: torch.Tensor,
        inputs: Inputs,
        *,
        router_experts: torch.Tensor | None,
        sites: tuple[Site, ...],
    ) -> dict[Site, torch.Tensor]:
        """Run the layer on its input [B,S,H], and return those of the sites on the CPU that it has.

        `router_experts`, int64 [B,S,k], is the choice that the experts replay, so that a flipped near-tie does not
        count as an arithmetic error; None to let the layer choose. The site `router_experts` is the layer's own choice;
        `router_weights` are the weights of the replayed choice, in its order.
        """
        experts = {Site.ROUTER_EXPERTS: LAYER_TAPS[Site.ROUTER_EXPERTS]}
        own_choice = Recorder(self._module, {} if self._graph.is_dense else experts, keep=copy_to_host)
        recording = recording_layer(
            self._module,
            sites=sites,
            graph=self._graph,
            attn_implementation=str(self._config._attn_implementation),
        )
        # Hooks fire in the order of registration: `own_choice` records the choice before `_replaying` replaces it.
        with torch.no_grad(), own_choice, self._replaying(router_experts), recording as tensors:
            self._forward(hidden_states.to(self._device, torch.float32), inputs)
        recorded = {**tensors, **own_choice.tensors}
        return {
            site: shape_to_batch(site, recorded[site], inputs.batch_shape)
            for site in sites
            if site in recorded
        }

    def _forward(self, hidden_states: torch.Tensor, inputs: Inputs) -> None:
        from transformers.masking_utils import create_causal_mask

        position_ids = inputs.position_ids.to(self._device)
        mask = create_causal_mask(
            self._config,
            hidden_states,
            inputs.attention_mask.to(self._device),
            None,  # the cache: by its place, as its name is `past_key_values` up to transformers 5.23, `cache` since
            position_ids=position_ids,
        )
        self._module(
            hidden_states,
            attention_mask=mask,
            position_ids=position_ids,
            position_embeddings=self._rotary(hidden_states, position_ids=position_ids),
        )

    @contextlib.contextmanager
    def _replaying(self, router_experts: torch.Tensor | None) -> Iterator[None]:
        """Replace the gate's choice of experts in the block, weighted by the gate's own scores; None keeps it."""
        if router_experts is None or self._graph.is_dense:
            yield
            return
        chosen = router_experts

        def replace(
            _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            logits, _weights, choice = output
            experts = chosen.reshape(choice.shape).to(choice.device, choice.dtype)
            return logits, self._router.shares(self._router.scores(logits), experts), experts

        handle = self._module.get_submodule("mlp.gate").register_forward_hook(replace)
        try:
            yield
        finally:
            handle.remove()


def _twin_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of the config that names `_upcast_experts`, which is registered with transformers here."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS_IMPLEMENTATION, _upcast_experts)
    twin = type(config).from_dict(config.to_dict())
    twin._attn_implementation = _ATTN_IMPLEMENTATION
    twin._experts_implementation = _EXPERTS_IMPLEMENTATION
    return twin


def _upcast_on_use(
    layer: torch.nn.Module,
    place: str,
    names: tuple[str, ...],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Give a projection its float32 weight just before it runs, and take it back afterwards."""
    projection = layer.get_submodule(place.removesuffix(".weight"))
    meta_weight = projection.get_parameter("weight")

    def bind(module: torch.nn.Module, _: Any) -> None:
        weight = torch.cat([tensors[name].to(device, torch.float32) for name in names])
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
    tensors, graph = getattr(module, _TENSORS)
    return upcast_experts(tensors, hidden_states, top_k_index, top_k_weights, graph=graph)
