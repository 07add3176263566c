"""transformers' own decoder layer as a target, in each of its implementations.

These ports are right by definition. They round in other places than the golden, so their difference is noise.
scripts/calibrate.py fits the limits of the verdict to it.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask

from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import expert_weight, float32_places, module_weights
from minimax_tools.reference.modules import modeling_class


def read_spec(config):
    """Return the spec of a port's config."""
    return ModelSpec.from_config(vars(config))


def make_config(config, *, attention, experts):
    """Return transformers' configuration of a model, with these implementations."""
    spec = read_spec(config)
    # Of a model that sees images too, the text model's.
    model_type = f"{spec.family.model_type}_text" if spec.family.text_key else spec.family.model_type
    own = AutoConfig.for_model(**{**spec.raw, "model_type": model_type})
    own._attn_implementation, own._experts_implementation = attention, experts
    return own


def keep_router(layer, spec, layer_idx):
    """Let the tensors of a float32 router be float32."""
    for _, path, leaf in float32_places(spec, layer_idx):
        module = layer.get_submodule(path)
        kind = nn.Buffer if leaf in module._buffers else nn.Parameter
        setattr(module, leaf, kind(getattr(module, leaf).float()))


def by_own_names(tensors, spec, layer_idx, prefix, *, swaps=False):
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


# Where transformers' layer shows its sites; a layer that lacks one does not.
SITES = {
    "input_norm": "layer.input_layernorm",
    "q_proj": "layer.self_attn.q_proj",
    "k_proj": "layer.self_attn.k_proj",
    "v_proj": "layer.self_attn.v_proj",
    "q_norm": "layer.self_attn.q_norm",
    "k_norm": "layer.self_attn.k_norm",
    "attn_context": "layer.self_attn.o_proj:input",
    "attn_delta": "layer.self_attn.o_proj",
    "attn_residual": "layer.post_attention_layernorm:input",
    "post_norm": "layer.post_attention_layernorm",
    "router_logits": "layer.mlp.gate:output[0]",
    "router_weights": "layer.mlp.gate:output[1]",
    "router_experts": "layer.mlp.gate:output[2]",
    "routed_delta": "layer.mlp.experts",
    "shared_delta": "layer.mlp.shared_experts",
    "moe_delta": "layer.mlp",
    "mlp_delta": "layer.mlp",
}


class Same(nn.Module):
    """transformers' layer with its mask and its rotary embedding, in the implementations that a golden has by default.

    The tensors of a float32 router stay in float32.
    """

    attn_implementation = "sdpa"
    experts_implementation = "grouped_mm"

    def __init__(self, config, layer_idx):
        super().__init__()
        spec = read_spec(config)
        self.config = make_config(
            config, attention=self.attn_implementation, experts=self.experts_implementation
        )
        self.layer = modeling_class(spec.family, "DecoderLayer")(self.config, layer_idx)
        keep_router(self.layer, spec, layer_idx)
        held = spec.graph.layer(layer_idx).sites
        self.sites = {site: path for site, path in SITES.items() if site in held}
        self.rotary = modeling_class(spec.family, "RotaryEmbedding")(self.config)

    def convert_state_dict(self, tensors, config, layer_idx):
        """Return the tensors by transformers' names."""
        return by_own_names(tensors, read_spec(config), layer_idx, "layer.")

    def forward(self, hidden_states, attention_mask, position_ids):
        """Map [B,S,H] to [B,S,H]."""
        # The fourth is the cache: named `past_key_values` up to transformers 5.23, and `cache` since.
        mask = create_causal_mask(self.config, hidden_states, attention_mask, None, position_ids=position_ids)
        rotation = self.rotary(hidden_states, position_ids=position_ids)
        return self.layer(
            hidden_states, attention_mask=mask, position_ids=position_ids, position_embeddings=rotation
        )


class EagerAttention(Same):
    """Eager attention: scores are rounded to BF16 before the softmax."""

    attn_implementation = "eager"


class FlexAttention(Same):
    """Attention compiled by torch, block by block."""

    attn_implementation = "flex_attention"


class EagerExperts(Same):
    """Eager experts: their outputs are added up in BF16."""

    experts_implementation = "eager"


class Eager(Same):
    """Eager attention and eager experts."""

    attn_implementation = "eager"
    experts_implementation = "eager"


class BatchedExperts(Same):
    """Weights gathered per token and expert."""

    experts_implementation = "batched_mm"


class LaterPositions(Same):
    """Positions counted from 5: attention sees only their differences, but rounds other numbers."""

    def forward(self, hidden_states, attention_mask, position_ids):
        """Map [B,S,H] to [B,S,H]."""
        return super().forward(hidden_states, attention_mask, position_ids + 5)


class RoundedWeights(Same):
    """Routing weights rounded to BF16, as the hub's own code for MiniMax-M2 does; sdpa and grouped experts."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if "router_weights" in self.sites:
            self.layer.mlp.gate.register_forward_hook(_round_weights)


def _round_weights(gate, arguments, outputs):
    """Replace the outputs of the router's gate."""
    logits, weights, experts = outputs
    return logits, weights.bfloat16().float(), experts


class Float32NormWeights(Same):
    """The norms' weights multiplied in float32 and rounded after it, as kernels that fuse the two do.

    Where norms multiply by 1 + weight, transformers does so itself.
    """

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if read_spec(config).graph.has_gain_of_one_plus:
            return
        for norm in self.layer.modules():
            if hasattr(norm, "variance_epsilon"):
                norm.register_forward_hook(_weigh_in_float32)


def _weigh_in_float32(norm, arguments, _):
    """Replace a norm's output: compute it again from its only argument."""
    exact = arguments[0].float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return (norm.weight.float() * exact).to(arguments[0].dtype)
