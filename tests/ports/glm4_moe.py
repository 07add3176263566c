"""Ports of GLM-4 MoE on transformers' own modules, filled by the hub's names; right ones, and ones that err."""

from __future__ import annotations

import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding

SITES = {
    "input_norm": "input_layernorm",
    **{site: f"self_attn.{site}" for site in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")},
    "attn_context": "self_attn.o_proj:input",
    "attn_delta": "self_attn.o_proj",
    "attn_residual": "post_attention_layernorm:input",
    "post_norm": "post_attention_layernorm",
    "router_logits": "mlp.gate:output[0]",
    "router_weights": "mlp.gate:output[1]",
    "router_experts": "mlp.gate:output[2]",
    "routed_delta": "mlp.experts",
    "shared_delta": "mlp.shared_experts",
    "moe_delta": "mlp",
    "mlp_delta": "mlp",
}


def own_config(config):
    """Return transformers' config, from the keys of config.json."""
    known = {name: value for name, value in vars(config).items() if name in Glm4MoeConfig.__annotations__}
    own = Glm4MoeConfig(**known, head_dim=config.head_dim)
    own._attn_implementation, own._experts_implementation = "sdpa", "eager"
    return own


def fuse_experts(tensors, config, layer_idx):
    """Replace the experts' matrices in the mapping by transformers' two tensors, in place; a dense layer has none."""
    if layer_idx < config.first_k_dense_replace:
        return tensors
    names = [f"mlp.experts.{expert}." for expert in range(config.n_routed_experts)]
    gate_up = [
        torch.cat((tensors.pop(f"{name}gate_proj.weight"), tensors.pop(f"{name}up_proj.weight")))
        for name in names
    ]
    tensors["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    tensors["mlp.experts.down_proj"] = torch.stack([tensors.pop(f"{name}down_proj.weight") for name in names])
    return tensors


class ByName(Glm4MoeDecoderLayer):
    """The layer; its sites are found by the names of its modules."""

    def __init__(self, config, layer_idx):
        self.config = own_config(config)
        super().__init__(self.config, layer_idx)
        self.rotary = Glm4MoeRotaryEmbedding(self.config)

    def convert_state_dict(self, tensors, config, layer_idx):
        return fuse_experts(tensors, config, layer_idx)

    def forward(self, hidden_states, attention_mask, position_ids):
        mask = create_causal_mask(self.config, hidden_states, attention_mask, None, position_ids=position_ids)
        rotation = self.rotary(hidden_states, position_ids)
        return super().forward(
            hidden_states, attention_mask=mask, position_ids=position_ids, position_embeddings=rotation
        )


class Layer(ByName):
    """The layer with its sites named, those of both kinds of layers together."""

    sites = SITES


class SharedSwapped(Layer):
    """Gate and up of the shared expert, and of a dense layer's MLP, are exchanged."""

    def convert_state_dict(self, tensors, config, layer_idx):
        place = "mlp." if layer_idx < config.first_k_dense_replace else "mlp.shared_experts."
        gate, up = f"{place}gate_proj.weight", f"{place}up_proj.weight"
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return super().convert_state_dict(tensors, config, layer_idx)


class BiasLost(Layer):
    """The bias of k_proj is zero."""

    def convert_state_dict(self, tensors, config, layer_idx):
        tensors["self_attn.k_proj.bias"] = torch.zeros_like(tensors["self_attn.k_proj.bias"])
        return super().convert_state_dict(tensors, config, layer_idx)


class BiasesSwapped(Layer):
    """The biases of k_proj and v_proj are exchanged."""

    def convert_state_dict(self, tensors, config, layer_idx):
        key, value = "self_attn.k_proj.bias", "self_attn.v_proj.bias"
        tensors[key], tensors[value] = tensors[value], tensors[key]
        return super().convert_state_dict(tensors, config, layer_idx)


class Model(Glm4MoeForCausalLM):
    """The whole model, with transformers' cache."""

    sites = {"layers": "model.layers", **SITES}

    def __init__(self, config):
        super().__init__(own_config(config))

    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx is None:
            return tensors
        return {
            f"model.layers.{layer_idx}.{name}": tensor
            for name, tensor in fuse_experts(tensors, config, layer_idx).items()
        }

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=True)
