"""The example port on weights into which scales are folded; every class is a target of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "examples"))
import port

ATTENTION, EXPERTS, GATE = "self_attn.", "block_sparse_moe.experts.", "block_sparse_moe.gate.weight"


def factors(size, layer_idx):
    """Factors of powers of two, so that weights times them lose no digit."""
    generator = torch.Generator().manual_seed(layer_idx)
    return torch.exp2(torch.randint(-2, 3, (size,), generator=generator).float())


class Folded(port.DecoderLayer):
    """A layer whose tensors `fold` changes before they are converted."""

    def convert_state_dict(self, tensors, config, layer_idx):
        return super().convert_state_dict(self.fold(dict(tensors), config, layer_idx), config, layer_idx)


def multiply(tensors, name, scale):
    """Multiply a tensor by a scale that broadcasts with it, in its own dtype."""
    tensors[name] = (tensors[name].float() * scale).to(tensors[name].dtype)


class SmoothedExperts(Folded):
    """A scale taken out of the second norm, and put into the gate, gate_proj and up_proj."""

    gate, experts = True, True

    def fold(self, tensors, config, layer_idx):
        scale = factors(config.hidden_size, layer_idx)
        multiply(tensors, "post_attention_layernorm.weight", 1 / scale)
        if self.gate:
            multiply(tensors, GATE, scale)
        for expert in range(config.num_local_experts if self.experts else 0):
            for name in ("w1", "w3"):
                multiply(tensors, f"{EXPERTS}{expert}.{name}.weight", scale)
        return tensors


class GateLeft(SmoothedExperts):
    gate = False


class ExpertsLeft(SmoothedExperts):
    experts = False


class NormAlone(SmoothedExperts):
    gate, experts = False, False


class SmoothedAttention(Folded):
    """A scale taken out of the first norm, and put into q, k and v."""

    names = "qkv"

    def fold(self, tensors, config, layer_idx):
        scale = factors(config.hidden_size, layer_idx)
        multiply(tensors, "input_layernorm.weight", 1 / scale)
        for name in self.names:
            multiply(tensors, f"{ATTENTION}{name}_proj.weight", scale)
        return tensors


class ValuesLeft(SmoothedAttention):
    names = "qk"


class FoldedValues(Folded):
    """A scale put into the values, and taken out of o_proj, where each kv head has several query heads."""

    undone = True

    def fold(self, tensors, config, layer_idx):
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        scale = factors(kv_heads * config.head_dim, layer_idx)
        multiply(tensors, f"{ATTENTION}v_proj.weight", scale[:, None])
        of_queries = scale.view(kv_heads, -1).repeat_interleave(heads // kv_heads, dim=0).flatten()
        if self.undone:
            multiply(tensors, f"{ATTENTION}o_proj.weight", 1 / of_queries)
        return tensors


class ValuesScaled(FoldedValues):
    undone = False


class QueryScale(Folded):
    """The attention's own scale put into the queries' norm."""

    def fold(self, tensors, config, layer_idx):
        multiply(tensors, f"{ATTENTION}q_norm.weight", config.head_dim**-0.5)
        return tensors

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = UnscaledAttention(config)


class UnscaledAttention(port.Attention):
    def attend(self, q, k, v, attention_mask):
        return super().attend(q * self.config.head_dim**0.5, k, v, attention_mask)


class QueriesAgainstKeys(Folded):
    """A scale put into the queries' norm and taken out of the keys'."""

    def fold(self, tensors, config, layer_idx):
        multiply(tensors, f"{ATTENTION}q_norm.weight", 4.0)
        multiply(tensors, f"{ATTENTION}k_norm.weight", 0.25)
        return tensors


class QueriesAlone(Folded):
    def fold(self, tensors, config, layer_idx):
        multiply(tensors, f"{ATTENTION}q_norm.weight", 1.02)
        return tensors
