"""transformers' own modules as ports of every family: a right layer, one with gate and up swapped, a whole model.

scripts/families.py runs them. They take their weights by the hub's names.

B batch, S columns of a pass, V vocabulary.
"""

from __future__ import annotations

import torch
import transformers_port
from torch import nn
from transformers import AutoConfig

from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expert_weight, float32_places, module_weights
from minimax_tools.reference.modules import modeling_class


def read_spec(config):
    """Return the spec of a port's config."""
    return ModelSpec.from_config(vars(config))


def make_config(config):
    """Return transformers' config of a port's."""
    spec = read_spec(config)
    # Of a model that sees images too, the text model's.
    model_type = f"{spec.family.model_type}_text" if spec.family.text_key else spec.family.model_type
    made = AutoConfig.for_model(**{**spec.raw, "model_type": model_type})
    made._attn_implementation, made._experts_implementation = "sdpa", "grouped_mm"
    return made


def keep_router(layer, spec, layer_idx):
    """Let the tensors of a float32 router be float32."""
    for _, path, leaf in float32_places(spec, layer_idx):
        module = layer.get_submodule(path)
        kind = nn.Buffer if leaf in module._buffers else nn.Parameter
        setattr(module, leaf, kind(getattr(module, leaf).float()))


def by_own_names(tensors, spec, layer_idx, prefix, *, swaps):
    """Return a layer's tensors by transformers' names: the experts stacked, gate before up or, if it swaps, behind."""
    stored_names = spec.family.stored_names
    state = {
        prefix + module: torch.cat([tensors[stored_names.stored(name)] for name in names])
        for module, names in module_weights(spec, layer_idx).items()
    }
    if spec.graph.layer(layer_idx).is_dense:
        return state

    def stack(matrix):
        names = (expert_weight(expert, matrix) for expert in range(spec.num_local_experts))
        return torch.stack([tensors[stored_names.stored(name)] for name in names])

    gate, up = stack("w1"), stack("w3")
    state[prefix + "mlp.experts.gate_up_proj"] = torch.cat((up, gate) if swaps else (gate, up), dim=1)
    state[prefix + "mlp.experts.down_proj"] = stack("w2")
    return state


# Sites that a layer may have or not.
_SITES = {
    "routed_delta": "layer.mlp.experts",
    "shared_delta": "layer.mlp.shared_experts",
    "mlp_delta": "layer.mlp",
}


class Layer(nn.Module):
    """transformers' decoder layer with its mask and its rotary embedding."""

    sites = transformers_port.Same.sites
    first_swapped = None  # layers from this number on have gate and up swapped

    def __init__(self, config, layer_idx):
        super().__init__()
        spec = read_spec(config)
        self.config = make_config(config)
        self.layer = modeling_class(spec.family, "DecoderLayer")(self.config, layer_idx)
        keep_router(self.layer, spec, layer_idx)
        kind = spec.graph.layer(layer_idx)
        self.sites = {site: path for site, path in {**self.sites, **_SITES}.items() if site in kind.sites}
        self.rotary = modeling_class(spec.family, "RotaryEmbedding")(self.config)

    def convert_state_dict(self, tensors, config, layer_idx):
        """Return the tensors by transformers' names."""
        swaps = self.first_swapped is not None and layer_idx >= self.first_swapped
        return by_own_names(tensors, read_spec(config), layer_idx, "layer.", swaps=swaps)

    forward = transformers_port.Same.forward


class SwappedLayer(Layer):
    """Port whose layers have gate and up swapped."""

    first_swapped = 0


class LateSwappedLayer(Layer):
    """Port whose layers have gate and up swapped from layer 2 on."""

    first_swapped = 2


class Model(nn.Module):
    """transformers' model with its cache."""

    def __init__(self, config):
        super().__init__()
        self.spec = read_spec(config)
        self.whole = modeling_class(self.spec.family, "ForCausalLM")(make_config(config))
        for index, layer in enumerate(self.whole.model.layers):
            keep_router(layer, self.spec, index)
        # The last layer has experts in every family.
        kind = self.spec.graph.layer(self.spec.num_hidden_layers - 1)
        self.sites = {
            "layers": "whole.model.layers",
            "embedding": "whole.model.embed_tokens",
            "final_norm": "whole.model.norm",
            **{site: path.removeprefix("layer.") for site, path in Layer.sites.items() if site in kind.sites},
        }

    def convert_state_dict(self, tensors, config, layer_idx):
        """Return a layer's tensors by transformers' names, or, for `layer_idx` None, the others'."""
        if layer_idx is None:
            return {f"whole.{self.spec.family.stored_names.own(name)}": tensors[name] for name in tensors}
        prefix = f"whole.model.layers.{layer_idx}."
        return by_own_names(tensors, self.spec, layer_idx, prefix, swaps=False)

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        """Return transformers' output: logits [B,S,V] and the cache."""
        return self.whole(input_ids, attention_mask, position_ids, past_key_values, use_cache=True)
