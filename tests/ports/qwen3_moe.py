"""Ports of Qwen3-MoE on transformers' own modules, filled by the hub's names; right ones, and ones that err."""

from __future__ import annotations

from hub_moe import SITES, LayerPort, ModelPort, fuse_experts
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeRotaryEmbedding


class ByName(LayerPort, Qwen3MoeDecoderLayer):
    """The layer; its sites are found by the names of its modules."""

    config_class, rotary_class = Qwen3MoeConfig, Qwen3MoeRotaryEmbedding


class Layer(ByName):
    """The layer with its sites named."""

    sites = SITES


def swap_gate_up(tensors, config):
    """Exchange gate and up of every expert, in place."""
    for expert in range(config.num_experts):
        gate, up = (f"mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


class SwappedGateUp(Layer):
    """Gate and up are exchanged before they are fused."""

    def convert_state_dict(self, tensors, config, layer_idx):
        swap_gate_up(tensors, config)
        return super().convert_state_dict(tensors, config, layer_idx)


class SharesLost(Layer):
    """Routing weights are not divided by their sum."""

    def __init__(self, config, layer_idx):
        config.norm_topk_prob = False
        super().__init__(config, layer_idx)


class NamesOfM2(Layer):
    """Asks for a tensor by MiniMax-M2's name."""

    def convert_state_dict(self, tensors, config, layer_idx):
        return {"mlp.gate.weight": tensors["block_sparse_moe.gate.weight"]}


class Model(ModelPort, Qwen3MoeForCausalLM):
    """The whole model, with transformers' cache."""

    config_class = Qwen3MoeConfig
    sites = {"layers": "model.layers", **SITES}


class ModelAtOnce(Model):
    """The whole model, all of its tensors converted at once."""

    def convert_state_dict(self, tensors, config):
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            names = [name for name in tensors if name.startswith(prefix)]
            layer_tensors = {name.removeprefix(prefix): tensors.pop(name) for name in names}
            tensors.update(
                {prefix + name: value for name, value in fuse_experts(layer_tensors, config).items()}
            )
        return tensors


class SwappedModel(Model):
    """The whole model, with gate and up exchanged in layer 2."""

    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx == 2:
            swap_gate_up(tensors, config)
        return super().convert_state_dict(tensors, config, layer_idx)
