"""MiniMax-M3: the text model of its checkpoints, and copies of them; vision weights beside it are left alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minimax_tools.model.family import Family
from minimax_tools.model.graph import BlockSparsity, ModelGraph, QkNorm
from minimax_tools.model.stored_names import StoredNames

_MLP = ("gate_proj", "up_proj", "down_proj")
_INDEXER = ("q_proj", "k_proj", "q_norm", "k_norm")


def _read_graph(config: Mapping[str, Any]) -> ModelGraph:
    num_layers = config["num_hidden_layers"]
    sparse = config.get("sparse_attention_config") or {}
    mlps = config.get("mlp_layer_types") or _kinds(
        config.get("moe_layer_freq"), "sparse", "dense", num_layers
    )
    attentions = config.get("layer_types") or _kinds(
        sparse.get("sparse_attention_freq"), "minimax_m3_sparse", "full_attention", num_layers, default=False
    )

    def of_indexer(key: str, older: str, default: int) -> int:
        return int(sparse.get(older, config.get(key, default)))

    return ModelGraph(
        qk_norm=QkNorm.PER_HEAD,
        has_gain_of_one_plus=True,
        sum_scale=float(config.get("routed_scaling_factor", 2.0)),
        shared_width=config.get("shared_intermediate_size", 3072),
        swiglu_alpha=float(config.get("swiglu_alpha", 1.702)),
        swiglu_limit=float(config.get("swiglu_limit", 7.0)),
        dense_layers=tuple(layer for layer, kind in enumerate(mlps) if kind == "dense"),
        dense_width=config.get("dense_intermediate_size", 12288),
        sparse_layers=tuple(layer for layer, kind in enumerate(attentions) if kind == "minimax_m3_sparse"),
        sparsity=BlockSparsity(
            num_heads=of_indexer("index_n_heads", "sparse_num_index_heads", 4),
            head_dim=of_indexer("index_head_dim", "sparse_index_dim", 128),
            block_size=of_indexer("index_block_size", "sparse_block_size", 128),
            num_blocks=of_indexer("index_topk_blocks", "sparse_topk_blocks", 16),
        ),
    )


def _kinds(
    flags: list[int] | None, one: str, zero: str, num_layers: int, *, default: bool = True
) -> list[str]:
    """Return the kind of each layer, from a flag for each or from the default of all."""
    return [one if flag else zero for flag in flags or [default] * num_layers]


def _other_keys(sizes: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, width = sizes["num_hidden_layers"], sizes["intermediate_size"]
    num_dense = min(3, num_layers - 1) if num_layers > 8 else 1
    return {
        "attention_dropout": 0.0,
        "dense_intermediate_size": 4 * width,
        "hidden_act": "swigluoai",
        "index_block_size": 128,
        "index_head_dim": sizes["head_dim"],
        "index_local_blocks": 1,
        "index_n_heads": sizes["num_key_value_heads"],
        "index_topk_blocks": 16,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * num_dense + ["minimax_m3_sparse"] * (num_layers - num_dense),
        "max_position_embeddings": 524288,
        "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense),
        "partial_rotary_factor": sizes["rotary_dim"] / sizes["head_dim"],
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "routed_scaling_factor": 2.0,
        "shared_intermediate_size": width,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


MINIMAX_M3 = Family(
    model_type="minimax_m3_vl",
    title="MiniMax-M3",
    originals="MiniMaxAI/MiniMax-M3",
    text_key="text_config",
    read_keys=frozenset(("layer_types", "routed_scaling_factor", "shared_intermediate_size")),
    read_graph=_read_graph,
    width_keys=("dense_intermediate_size", "shared_intermediate_size"),
    names_rotary_width=True,
    stored_names=StoredNames(prefix="language_model."),
    own_module_names=StoredNames(
        layer=MappingProxyType(
            {
                "block_sparse_moe.gate.weight": "mlp.gate.weight",
                "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
                **{
                    f"block_sparse_moe.shared_experts.{name}.weight": f"mlp.shared_experts.{name}.weight"
                    for name in _MLP
                },
                **{f"self_attn.index_{name}.weight": f"self_attn.indexer.{name}.weight" for name in _INDEXER},
            }
        )
    ),
    fuses_gate_up=True,
    transformers_prefix="MiniMaxM3VL",
    preset="m3",
    preset_words="MiniMax-M3, its text model",
    toy_preset="toy-m3",
    true_sizes=MappingProxyType(
        {
            "num_hidden_layers": 60,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rotary_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "intermediate_size": 3072,
            "vocab_size": 200064,
        }
    ),
    other_keys=_other_keys,
)
