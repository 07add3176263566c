"""GLM-4 with experts: GLM-4.5, -4.6, -4.7 and copies of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minimax_tools.model.families.qwen3_moe import QWEN_NAMES
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph, QkNorm
from minimax_tools.model.stored_names import StoredNames

# Names of a mixture with a correction bias and shared experts, which other families have too.
SHARED_NAMES = StoredNames(
    layer=MappingProxyType(
        {
            **QWEN_NAMES.layer,
            "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
            **{
                f"block_sparse_moe.shared_experts.{matrix}.weight": f"mlp.shared_experts.{matrix}.weight"
                for matrix in ("gate_proj", "up_proj", "down_proj")
            },
        }
    )
)


def _read_graph(config: Mapping[str, Any]) -> ModelGraph:
    return ModelGraph(
        qk_norm=QkNorm.PER_HEAD if config.get("use_qk_norm", False) else QkNorm.NONE,
        has_qkv_bias=bool(config.get("attention_bias", False)),
        normalises_shares=bool(config.get("norm_topk_prob", True)),
        share_scale=float(config.get("routed_scaling_factor", 1.0)),
        shared_width=config["moe_intermediate_size"] * config.get("n_shared_experts", 1),
        dense_layers=tuple(range(config.get("first_k_dense_replace", 1))),
        dense_width=config["intermediate_size"],
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    title="GLM-4 MoE",
    originals="zai-org/GLM-4.5, GLM-4.5-Air, GLM-4.6 or GLM-4.7",
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
    width_keys=("intermediate_size",),
    default_rotary_factor=0.5,
    stored_names=SHARED_NAMES,
    transformers_prefix="Glm4Moe",
    preset="glm4-moe",
    preset_words="GLM-4.5-Air",
    toy_preset="toy-glm4-moe",
    true_sizes=MappingProxyType(
        {
            "num_hidden_layers": 46,
            "hidden_size": 4096,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "intermediate_size": 1408,
            "vocab_size": 151552,
        }
    ),
    derived_sizes=frozenset(("rotary_dim",)),
    other_keys=lambda sizes: {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        # The dense layer is as wide as the experts that a token takes.
        "intermediate_size": sizes["intermediate_size"] * sizes["num_experts_per_tok"],
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_qk_norm": True,
    },
)
