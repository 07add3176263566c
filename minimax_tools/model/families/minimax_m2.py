"""MiniMax-M2: M2, M2.1, M2.5, M2.7 and copies of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.stored_names import StoredNames


def _other_keys(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attn_type_list": [1] * sizes["num_hidden_layers"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 196608,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "output_router_logits": False,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    title="MiniMax-M2",
    originals="MiniMaxAI/MiniMax-M2, -M2.1, -M2.5 or -M2.7",
    fixed_values=MappingProxyType(
        {
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "hidden_act": "silu",
        }
    ),
    read_graph=lambda config: ModelGraph(),
    names_rotary_width=True,
    originals_are_fp8=True,
    own_module_names=StoredNames(
        layer=MappingProxyType(
            {
                "block_sparse_moe.gate.weight": "mlp.gate.weight",
                "block_sparse_moe.e_score_correction_bias": "mlp.e_score_correction_bias",
            }
        )
    ),
    transformers_prefix="MiniMaxM2",
    preset="m2",
    preset_words="MiniMax-M2",
    toy_preset="toy",
    true_sizes=MappingProxyType(
        {
            "num_hidden_layers": 62,
            "hidden_size": 3072,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rotary_dim": 64,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "intermediate_size": 1536,
            "vocab_size": 200064,
        }
    ),
    other_keys=_other_keys,
)
