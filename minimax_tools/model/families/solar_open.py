"""Solar Open and copies of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minimax_tools.model.families.glm4_moe import SHARED_NAMES
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph, QkNorm


def _read_graph(config: Mapping[str, Any]) -> ModelGraph:
    return ModelGraph(
        qk_norm=QkNorm.NONE,
        has_qkv_bias=bool(config.get("attention_bias", False)),
        normalises_shares=bool(config.get("norm_topk_prob", True)),
        share_scale=float(config.get("routed_scaling_factor", 1.0)),
        shared_width=config["moe_intermediate_size"] * config.get("n_shared_experts", 1),
    )


SOLAR_OPEN = Family(
    model_type="solar_open",
    title="Solar Open",
    originals="upstage/Solar-Open-100B",
    fixed_values=MappingProxyType({"hidden_act": "silu"}),
    read_keys=frozenset(("attention_bias", "n_shared_experts", "norm_topk_prob", "routed_scaling_factor")),
    read_graph=_read_graph,
    size_keys=MappingProxyType(
        {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"}
    ),
    stored_names=SHARED_NAMES,
    transformers_prefix="SolarOpen",
    preset="solar-open",
    preset_words="Solar-Open-100B",
    toy_preset="toy-solar-open",
    true_sizes=MappingProxyType(
        {
            "num_hidden_layers": 48,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "intermediate_size": 1280,
            "vocab_size": 196608,
        }
    ),
    derived_sizes=frozenset(("rotary_dim",)),
    other_keys=lambda sizes: {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
    },
)
