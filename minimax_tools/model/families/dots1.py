"""dots.llm1 and copies of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minimax_tools.model.families.glm4_moe import SHARED_NAMES
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph, QkNorm


def _read_graph(config: Mapping[str, Any]) -> ModelGraph:
    has_bias = bool(config.get("attention_bias", False))
    return ModelGraph(
        qk_norm=QkNorm.PER_HEAD,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        normalises_shares=bool(config.get("norm_topk_prob", False)),
        share_scale=float(config.get("routed_scaling_factor", 1.0)),
        shared_width=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
        dense_layers=tuple(range(config.get("first_k_dense_replace") or 0)),
        dense_width=config["intermediate_size"],
    )


DOTS1 = Family(
    model_type="dots1",
    title="dots.llm1",
    originals="rednote-hilab/dots.llm1.base or dots.llm1.inst",
    fixed_values=MappingProxyType({"hidden_act": "silu"}),
    read_keys=frozenset(
        (
            "attention_bias",
            "first_k_dense_replace",
            "n_shared_experts",
            "norm_topk_prob",
            "routed_scaling_factor",
        )
    ),
    read_graph=_read_graph,
    size_keys=MappingProxyType(
        {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"}
    ),
    stored_names=SHARED_NAMES,
    transformers_prefix="Dots1",
    preset="dots1",
    preset_words="dots.llm1",
    toy_preset="toy-dots1",
    true_sizes=MappingProxyType(
        {
            "num_hidden_layers": 62,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 6,
            "intermediate_size": 1408,
            "vocab_size": 152064,
        }
    ),
    derived_sizes=frozenset(("rotary_dim",)),
    other_keys=lambda sizes: {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size": sizes["intermediate_size"] * sizes["num_experts_per_tok"],
        "max_position_embeddings": 32768,
        "max_window_layers": sizes["num_hidden_layers"],
        "n_group": 1,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "routed_scaling_factor": 2.5,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
    },
)
