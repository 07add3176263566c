"""Parts of ports on transformers' own modules of a mixture of experts, filled by the hub's names."""

from __future__ import annotations

import torch
from transformers.masking_utils import create_causal_mask

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


def own_config(config_class, config):
    """Return transformers' config, from the keys of config.json."""
    known = {name: value for name, value in vars(config).items() if name in config_class.__annotations__}
    own = config_class(**known, head_dim=config.head_dim)
    own._attn_implementation, own._experts_implementation = "sdpa", "eager"
    return own


def fuse_experts(tensors, config):
    """Replace the experts' matrices in the mapping by transformers' two tensors, in place; a dense layer has none."""
    names = [f"mlp.experts.{expert}." for expert in range(config.num_local_experts)]
    if f"{names[0]}gate_proj.weight" not in tensors:
        return tensors
    gate_up = [
        torch.cat((tensors.pop(f"{name}gate_proj.weight"), tensors.pop(f"{name}up_proj.weight")))
        for name in names
    ]
    tensors["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    tensors["mlp.experts.down_proj"] = torch.stack([tensors.pop(f"{name}down_proj.weight") for name in names])
    return tensors


class LayerPort:
    """Parts that a port adds to transformers' layer, which comes behind it among the bases."""

    def __init__(self, config, layer_idx):
        self.config = own_config(self.config_class, config)
        super().__init__(self.config, layer_idx)
        self.rotary = self.rotary_class(self.config)

    def convert_state_dict(self, tensors, config, layer_idx):
        return fuse_experts(tensors, config)

    def forward(self, hidden_states, attention_mask, position_ids):
        mask = create_causal_mask(self.config, hidden_states, attention_mask, None, position_ids=position_ids)
        rotation = self.rotary(hidden_states, position_ids)
        return super().forward(
            hidden_states, attention_mask=mask, position_ids=position_ids, position_embeddings=rotation
        )


class ModelPort:
    """Parts that a port adds to transformers' whole model, which comes behind it among the bases; with its cache."""

    def __init__(self, config):
        super().__init__(own_config(self.config_class, config))

    def convert_state_dict(self, tensors, config, layer_idx):
        if layer_idx is None:
            return tensors
        return {
            f"model.layers.{layer_idx}.{name}": tensor
            for name, tensor in fuse_experts(tensors, config).items()
        }

    def forward(self, input_ids, attention_mask, position_ids, past_key_values=None):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=True)
