"""TransformersLayer: one decoder layer of transformers, run by itself on a golden's input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.capture.recorder import Recorder, copy_to_host, shape_to_batch
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from minimax_tools.reference.modules import LAYER_TAPS, recording_layer

if TYPE_CHECKING:
    from transformers import MiniMaxM2Config


class TransformersLayer:
    """A decoder layer that is built without weights; `bind` gives it some.

    Args:
        config: transformers' config, which names the implementations of attention and experts.
        layer: The layer's number.
        device: Device to compute on.
        dtype: Dtype to compute in; None for that of the input.
    """

    def __init__(
        self, config: MiniMaxM2Config, *, layer: int, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        from transformers.models.minimax_m2.modeling_minimax_m2 import (
            MiniMaxM2DecoderLayer,
            MiniMaxM2RotaryEmbedding,
        )

        self._config = config
        self._device = device
        self._dtype = dtype
        with torch.device("meta"):
            self.module: torch.nn.Module = MiniMaxM2DecoderLayer(config, layer).eval()
        self._rotary = MiniMaxM2RotaryEmbedding(config).to(device)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None) -> None:
        """Give the layer some weights, by the hub's relative names, in `dtype` or else in their own."""
        weights = {
            name.replace("block_sparse_moe.", "mlp."): tensor.to(self._device, dtype)
            for name, tensor in tensors.items()
        }
        # Not strict: the float32 twin gives its large matrices only while they are used.
        self.module.load_state_dict(weights, strict=False, assign=True)

    def run(
        self,
        hidden_states: torch.Tensor,
        inputs: Inputs,
        *,
        router_experts: torch.Tensor | None,
        sites: tuple[Site, ...],
    ) -> dict[Site, torch.Tensor]:
        """Run the layer and return its sites on the CPU.

        Args:
            hidden_states: The layer's input [B,S,H].
            inputs: The batch, for its mask and positions.
            router_experts: int64 [B,S,k], the choice that the experts replay, so that a flipped near-tie does not
                count as an arithmetic error; None to let the layer choose.
            sites: Sites to return. `router_experts` is the layer's own choice; `router_weights` are the weights of
                the replayed choice, in its order.
        """
        own_choice = Recorder(
            self.module, {Site.ROUTER_EXPERTS: LAYER_TAPS[Site.ROUTER_EXPERTS]}, keep=copy_to_host
        )
        recording = recording_layer(
            self.module, sites=sites, attn_implementation=str(self._config._attn_implementation)
        )
        # Hooks fire in the order of registration: `own_choice` records the choice before `_replaying` replaces it.
        with torch.no_grad(), own_choice, _replaying(self.module, router_experts), recording as tensors:
            self._forward(hidden_states.to(self._device, self._dtype), inputs)
        recorded = {**tensors, **own_choice.tensors}
        return {site: shape_to_batch(site, recorded[site], inputs.batch_shape) for site in sites}

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
        self.module(
            hidden_states,
            attention_mask=mask,
            position_ids=position_ids,
            position_embeddings=self._rotary(hidden_states, position_ids=position_ids),
        )


@contextlib.contextmanager
def _replaying(layer: torch.nn.Module, router_experts: torch.Tensor | None) -> Iterator[None]:
    """Replace the gate's choice of experts in the block, weighted by the gate's own scores; None keeps it."""
    if router_experts is None:
        yield
        return

    def replace(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, _weights, choice = output
        experts = router_experts.reshape(choice.shape).to(choice.device, choice.dtype)
        scores = logits.sigmoid().gather(1, experts)
        return logits, scores / scores.sum(dim=-1, keepdim=True), experts

    handle = layer.get_submodule("mlp.gate").register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()
