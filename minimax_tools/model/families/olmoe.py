"""OLMoE: OLMoE-1B-7B and copies of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minimax_tools.model.families.qwen3_moe import QWEN_NAMES
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph, RouterScores


def _read_graph(config: Mapping[str, Any]) -> ModelGraph:
    return ModelGraph(
        router_scores=RouterScores.SOFTMAX,
        has_float32_router=False,
        has_float32_shares=False,
        has_correction_bias=False,
        normalises_shares=bool(config.get("norm_topk_prob", False)),
    )


OLMOE = Family(
    model_type="olmoe",
    title="OLMoE",
    originals="allenai/OLMoE-1B-7B-0125",
    fixed_values=MappingProxyType({"hidden_act": "silu", "clip_qkv": None}),
    read_keys=frozenset(("norm_topk_prob",)),
    read_graph=_read_graph,
    size_keys=MappingProxyType({"num_local_experts": "num_experts"}),
    stored_names=QWEN_NAMES,
    transformers_prefix="Olmoe",
    preset="olmoe",
    preset_words="OLMoE-1B-7B",
    toy_preset="toy-olmoe",
    derived_sizes=frozenset(("rotary_dim", "head_dim")),
    true_sizes=MappingProxyType(
        {
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "intermediate_size": 1024,
            "vocab_size": 50304,
        }
    ),
    # Its heads are as wide as the stream divided by their number.
    toy_sizes=MappingProxyType({"num_attention_heads": 4, "num_key_value_heads": 4}),
    other_keys=lambda sizes: {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "use_cache": True,
    },
)
