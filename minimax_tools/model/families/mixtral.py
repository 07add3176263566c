"""Mixtral: Mixtral-8x7B, Mixtral-8x22B and copies of them."""

from __future__ import annotations

from types import MappingProxyType

from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph, QkNorm, RouterScores
from minimax_tools.model.stored_names import StoredNames

MIXTRAL = Family(
    model_type="mixtral",
    title="Mixtral",
    originals="mistralai/Mixtral-8x7B-v0.1 or Mixtral-8x22B-v0.1",
    fixed_values=MappingProxyType({"hidden_act": "silu"}),
    read_graph=lambda config: ModelGraph(
        qk_norm=QkNorm.NONE,
        router_scores=RouterScores.SOFTMAX,
        has_float32_router=False,
        has_correction_bias=False,
    ),
    # Its checkpoints name experts as MiniMax-M2's do.
    own_module_names=StoredNames(layer=MappingProxyType({"block_sparse_moe.gate.weight": "mlp.gate.weight"})),
    transformers_prefix="Mixtral",
    preset="mixtral",
    preset_words="Mixtral-8x7B",
    toy_preset="toy-mixtral",
    true_sizes=MappingProxyType(
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 14336,
            "vocab_size": 32000,
        }
    ),
    toy_sizes=MappingProxyType({"num_local_experts": 8, "num_experts_per_tok": 2}),
    derived_sizes=frozenset(("rotary_dim",)),
    other_keys=lambda sizes: {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
    },
)
