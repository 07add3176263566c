from __future__ import annotations

from typing import Any

import pytest

from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.family import find_graph_faults

CONFIG: dict[str, Any] = {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(MINIMAX_M2.fixed_values),
        {"attn_type_list": [1, 1, 1, 1], "layer_types": ["full_attention"] * 4},
        {"attn_type_list": None, "sliding_window": None, "shared_intermediate_size": None},
        # The originals announce heads that predict further tokens, and ship none.
        {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1},
        # What the first configs of MiniMax-M2 carry along.
        {"mlp_intermediate_size": 8192, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"},
        {f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")},
        {
            "use_grouped_topk": True,
            "num_expert_group": None,
            "topk_group": None,
            "routed_scaling_factor": 1.0,
        },
        {"norm_topk_prob": True, "attn_window_size": -1, "postnorm": False, "attention_bias": False},
        # Training only.
        {"router_jitter_noise": 0.1, "attention_dropout": 0.1, "router_aux_loss_coef": 0.01},
    ],
)
def test_neutral_values_pass(changes: dict[str, Any]) -> None:
    assert find_graph_faults(MINIMAX_M2, {**CONFIG, **changes}) == []


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("attn_type_list", [1, 0, 1, 0], "0 in layers 1, 3"),
        ("attn_type_list", [1, 1, 1, 2], "2 in layer 3"),
        ("attn_type_list", [1, 1, 1], "3 entries"),
        ("attn_type_list", "full", "'full'"),
        ("decoder_attention_types", [0, 1, 1, 1], "0 in layer 0"),
        ("layer_types", ["full_attention"] * 3 + ["sliding_attention"], "'sliding_attention' in layer 3"),
        ("shared_intermediate_size", 1536, "1536"),
        ("n_shared_experts", 1, "1"),
        ("first_k_dense_replace", 3, "3"),
        ("mlp_only_layers", [0], "[0]"),
        ("sliding_window", 4096, "4096"),
        ("attn_window_size", [128, -1], "[128, -1]"),
        ("n_group", 8, "8"),
        ("topk_group", 4, "4"),
        ("routed_scaling_factor", 2.5, "2.5"),
        ("norm_topk_prob", False, "False"),
        ("layernorm_full_attention_alpha", 3.5565588200778455, "3.5565588200778455"),
        ("layernorm_mlp_beta", 0.5, "0.5"),
        ("mlp_alpha_factor", 3.5, "3.5"),
        ("postnorm", True, "True"),
        ("attention_bias", True, "True"),
        ("qk_norm_type", "per_head", "'per_head'"),
        ("use_qk_norm", False, "False"),
        ("use_routing_bias", False, "False"),
        ("scoring_func", "softmax", "'softmax'"),
        ("hidden_act", "gelu", "'gelu'"),
    ],
)
def test_another_graph_is_named(key: str, value: object, found: str) -> None:
    (fault,) = find_graph_faults(MINIMAX_M2, {**CONFIG, key: value})
    assert (fault.key, fault.found) == (key, found)
    assert fault.expected != found


def test_long_lists_of_layers_are_cut_short() -> None:
    kinds = [1 if layer % 8 == 7 else 0 for layer in range(80)]
    (fault,) = find_graph_faults(MINIMAX_M2, {"num_hidden_layers": 80, "attn_type_list": kinds})
    assert fault.found == "0 in layers 0, 1, 2, 3, 4, 5 and 64 more"
    assert fault.expected == "1 (softmax attention) for each of 80 layers"
