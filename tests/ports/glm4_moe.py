"""Ports of GLM-4 MoE on transformers' own modules, filled by the hub's names; right ones, and ones that err."""

from __future__ import annotations

import hub_moe
import torch
from hub_moe import LayerPort, ModelPort
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding

SITES = {
    **hub_moe.SITES,
    "routed_delta": "mlp.experts",
    "shared_delta": "mlp.shared_experts",
    "mlp_delta": "mlp",
}


class ByName(LayerPort, Glm4MoeDecoderLayer):
    """The layer; its sites are found by the names of its modules."""

    config_class, rotary_class = Glm4MoeConfig, Glm4MoeRotaryEmbedding


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


class Model(ModelPort, Glm4MoeForCausalLM):
    """The whole model, with transformers' cache."""

    config_class = Glm4MoeConfig
    sites = {"layers": "model.layers", **SITES}
