"""NxDI's own layer of Qwen3-MoE, with one mistake each."""

from __future__ import annotations

import torch
from neuronx_distributed_inference.models.qwen3_moe.modeling_qwen3_moe import (
    NeuronQwen3MoeDecoderLayer,
    NeuronQwen3MoeForCausalLM,
    Qwen3MoeInferenceConfig,
)


class SwappingApplication(NeuronQwen3MoeForCausalLM):
    """Converts as NxDI does, with up before gate."""

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        converted = NeuronQwen3MoeForCausalLM.convert_hf_to_neuron_state_dict(state_dict, config)
        name = "layers.0.mlp.expert_mlps.mlp_op.gate_up_proj.weight"
        converted[name] = torch.cat(converted[name].chunk(2, dim=-1)[::-1], dim=-1)
        return converted


class SwappedGateUp(NeuronQwen3MoeDecoderLayer):
    """Gate and up exchanged."""

    mm2_causal_lm = SwappingApplication


class SharesLost(NeuronQwen3MoeDecoderLayer):
    """The chosen scores are not divided by their sum."""

    mm2_causal_lm = NeuronQwen3MoeForCausalLM

    def __init__(self, config: Qwen3MoeInferenceConfig, layer_idx):
        super().__init__(config, layer_idx)
        self.mlp.expert_mlps.routed_experts_mlp_config.normalize_top_k_affinities = False


class QueriesUnnormed(NeuronQwen3MoeDecoderLayer):
    """Queries are not normed: their norm's weight is taken, and not used."""

    mm2_causal_lm = NeuronQwen3MoeForCausalLM

    def __init__(self, config: Qwen3MoeInferenceConfig, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn.q_layernorm.forward = lambda queries: queries
