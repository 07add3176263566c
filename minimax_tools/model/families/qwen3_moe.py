"""Qwen3-MoE: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder and copies of them, if each layer has experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph, QkNorm, RouterScores
from minimax_tools.model.stored_names import StoredNames

# The experts' names of Qwen's first mixture of experts, which many families kept.
QWEN_NAMES = StoredNames(
    layer=MappingProxyType(
        {
            "block_sparse_moe.gate.weight": "mlp.gate.weight",
            "block_sparse_moe.experts.#.w1.weight": "mlp.experts.#.gate_proj.weight",
            "block_sparse_moe.experts.#.w2.weight": "mlp.experts.#.down_proj.weight",
            "block_sparse_moe.experts.#.w3.weight": "mlp.experts.#.up_proj.weight",
        }
    )
)


def _read_graph(config: Mapping[str, Any]) -> ModelGraph:
    return ModelGraph(
        qk_norm=QkNorm.PER_HEAD,
        router_scores=RouterScores.SOFTMAX,
        has_float32_router=False,
        has_float32_shares=False,
        has_correction_bias=False,
        # transformers' default; the published models set it.
        normalises_shares=bool(config.get("norm_topk_prob", False)),
    )


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    title="Qwen3-MoE",
    originals="Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B or Qwen3-Coder",
    fixed_values=MappingProxyType({"hidden_act": "silu", "use_sliding_window": False}),
    # The width of a window that is not used may stay.
    read_keys=frozenset(("norm_topk_prob", "sliding_window")),
    read_graph=_read_graph,
    size_keys=MappingProxyType(
        {"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"}
    ),
    stored_names=QWEN_NAMES,
    transformers_prefix="Qwen3Moe",
    preset="qwen3-moe",
    preset_words="Qwen3-30B-A3B",
    toy_preset="toy-qwen3-moe",
    derived_sizes=frozenset(("rotary_dim",)),
    true_sizes=MappingProxyType(
        {
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "intermediate_size": 768,
            "vocab_size": 151936,
        }
    ),
    other_keys=lambda sizes: {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": sizes["num_hidden_layers"],
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
    },
)
