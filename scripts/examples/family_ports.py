"""Ports of every family, of transformers' own modules: layers with gate and up swapped, and a whole model.

scripts/families.py runs them, beside the right layer of transformers_port.py. They take their weights by the hub's
names.

B batch, S columns of a pass, V vocabulary.
"""

from __future__ import annotations

from torch import nn
from transformers_port import SITES, Same, by_own_names, keep_router, make_config, read_spec

from minimax_tools.reference.modules import modeling_class


class SwappedLayer(Same):
    """Port whose layers have gate and up swapped."""

    first_swapped = 0  # layers from this number on are wrong

    def convert_state_dict(self, tensors, config, layer_idx):
        """Return the tensors by transformers' names."""
        swaps = layer_idx >= self.first_swapped
        return by_own_names(tensors, read_spec(config), layer_idx, "layer.", swaps=swaps)


class LateSwappedLayer(SwappedLayer):
    """Port whose layers have gate and up swapped from layer 2 on."""

    first_swapped = 2


class Model(nn.Module):
    """transformers' model with its cache, in the implementations that a golden has by default."""

    attn_implementation = "sdpa"
    experts_implementation = "grouped_mm"

    def __init__(self, config):
        super().__init__()
        self.spec = read_spec(config)
        own = make_config(config, attention=self.attn_implementation, experts=self.experts_implementation)
        self.whole = modeling_class(self.spec.family, "ForCausalLM")(own)
        for index, layer in enumerate(self.whole.model.layers):
            keep_router(layer, self.spec, index)
        # The last layer has experts in every family.
        kind = self.spec.graph.layer(self.spec.num_hidden_layers - 1)
        self.sites = {
            "layers": "whole.model.layers",
            "embedding": "whole.model.embed_tokens",
            "final_norm": "whole.model.norm",
            **{site: path.removeprefix("layer.") for site, path in SITES.items() if site in kind.sites},
        }

    def convert_state_dict(self, tensors, config, layer_idx):
        """Return a layer's tensors by transformers' names, or, for `layer_idx` None, the others'."""
        if layer_idx is None:
            return {f"whole.{self.spec.family.stored_names.own(name)}": tensors[name] for name in tensors}
        prefix = f"whole.model.layers.{layer_idx}."
        return by_own_names(tensors, self.spec, layer_idx, prefix)

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return transformers' output: logits [B,S,V] and the cache."""
        return self.whole(input_ids, attention_mask, position_ids, past_key_values, use_cache=True)
