"""Ports of Qwen3-MoE on transformers' own modules, filled by the hub's names; right ones, and ones that err."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeRotaryEmbedding

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
    "moe_delta": "mlp",
}


def own_config(config):
    """Return transformers' config, from the keys of config.json."""
    known = {name: value for name, value in vars(config).items() if name in Qwen3MoeConfig.__annotations__}
    own = Qwen3MoeConfig(**known, head_dim=config.head_dim)
    own._attn_implementation, own._experts_implementation = "sdpa", "eager"
    return own


def fuse_experts(tensors, config):
    """Replace the experts' matrices in the mapping by transformers' two tensors, in place."""
    names = [f"mlp.experts.{expert}." for expert in range(config.num_experts)]
    gate_up = [
        torch.cat((tensors.pop(f"{name}gate_proj.weight"), tensors.pop(f"{name}up_proj.weight")))
        for name in names
    ]
    tensors["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    tensors["mlp.experts.down_proj"] = torch.stack([tensors.pop(f"{name}down_proj.weight") for name in names])
    return tensors


class ByName(Qwen3MoeDecoderLayer):
    """The layer; its sites are found by the names of its modules."""

    def __init__(self, config, layer_idx):
        self.config = own_config(config)
        super().__init__(self.config, layer_idx)
        self.rotary = Qwen3MoeRotaryEmbedding(self.config)

    def convert_state_dict(self, tensors, config, layer_idx):
        return fuse_experts(tensors, config)

    def forward(self, hidden_states, attention_mask, position_ids):
        mask = create_causal_mask(self.config, hidden_states, attention_mask, None, position_ids=position_ids)
        rotation = self.rotary(hidden_states, position_ids)
        return super().forward(
            hidden_states, attention_mask=mask, position_ids=position_ids, position_embeddings=rotation
        )


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


class Model(Qwen3MoeForCausalLM):
    """The whole model, with transformers' cache."""

    sites = {"layers": "model.layers", **SITES}

    def __init__(self, config):
        super().__init__(own_config(config))

    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx is None:
            return tensors
        return {
            f"model.layers.{layer_idx}.{name}": tensor
            for name, tensor in fuse_experts(tensors, config).items()
        }

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=True)


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
