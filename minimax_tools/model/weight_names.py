"""Names and shapes of a MiniMax-M2 checkpoint's tensors, as on the hub.

A layer's tensors are named relative to the layer (`self_attn.q_proj.weight`); `layer_prefix` makes them full.
H hidden, N heads, K kv heads, D head_dim, E experts, I intermediate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from minimax_tools.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"  # [vocab,H]
FINAL_NORM = "model.norm.weight"  # [H]
LM_HEAD = "lm_head.weight"  # [vocab,H]; absent if the embedding is tied

Q_PROJ = "self_attn.q_proj.weight"  # [N·D,H]
K_PROJ = "self_attn.k_proj.weight"  # [K·D,H]
V_PROJ = "self_attn.v_proj.weight"  # [K·D,H]
O_PROJ = "self_attn.o_proj.weight"  # [H,N·D]
Q_NORM = "self_attn.q_norm.weight"  # [N·D]
K_NORM = "self_attn.k_norm.weight"  # [K·D]
INPUT_NORM = "input_layernorm.weight"  # [H]
POST_NORM = "post_attention_layernorm.weight"  # [H]
GATE = "block_sparse_moe.gate.weight"  # [E,H]
CORRECTION_BIAS = "block_sparse_moe.e_score_correction_bias"  # [E]

# Every expert tensor's name contains this, and no other tensor's does.
EXPERTS = ".experts."
ATTENTION_MATRICES = (Q_PROJ, K_PROJ, V_PROJ, O_PROJ)
ATTENTION_AND_NORM_NAMES = (*ATTENTION_MATRICES, Q_NORM, K_NORM, INPUT_NORM, POST_NORM)

# The router computes in float32: these two tensors are never rounded to the run's dtype.
FLOAT32_NAMES = (GATE, CORRECTION_BIAS)
_FLOAT32_BYTES = 4

EXPERT_GATE, EXPERT_DOWN, EXPERT_UP = "w1", "w2", "w3"  # [I,H], [H,I], [I,H]
EXPERT_MATRICES = (EXPERT_GATE, EXPERT_DOWN, EXPERT_UP)

SCALE_SUFFIX = ".weight_scale_inv"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def head_name(spec: ModelSpec) -> str:
    """Return the name of lm_head's weight; if it is tied, that is the embedding."""
    return EMBEDDING if spec.tie_word_embeddings else LM_HEAD


def layer_prefix(layer: int) -> str:
    """Return the prefix of the names of a decoder layer's tensors."""
    return f"model.layers.{layer}."


def layer_of(name: str) -> int | None:
    """Return the decoder layer of a full name; None for embedding, final norm and lm_head."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def expert_weight(expert: int, matrix: str) -> str:
    """Return the relative name of an expert's `w1` (gate), `w2` (down) or `w3` (up)."""
    return f"block_sparse_moe.experts.{expert}.{matrix}.weight"


def scale_name(weight_name: str) -> str:
    """Return the name of an FP8 weight's float32 block scales."""
    return weight_name + "_scale_inv"


def expected_layer_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors by relative name, without FP8 scales, experts in numeric order."""
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        Q_PROJ: (spec.query_width, hidden),
        K_PROJ: (spec.key_value_width, hidden),
        V_PROJ: (spec.key_value_width, hidden),
        O_PROJ: (hidden, spec.query_width),
        Q_NORM: (spec.query_width,),
        K_NORM: (spec.key_value_width,),
        INPUT_NORM: (hidden,),
        POST_NORM: (hidden,),
        GATE: (spec.num_local_experts, hidden),
        CORRECTION_BIAS: (spec.num_local_experts,),
    }
    for expert in range(spec.num_local_experts):
        shapes[expert_weight(expert, EXPERT_GATE)] = (intermediate, hidden)
        shapes[expert_weight(expert, EXPERT_DOWN)] = (hidden, intermediate)
        shapes[expert_weight(expert, EXPERT_UP)] = (intermediate, hidden)
    return MappingProxyType(shapes)


def layer_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of a decoder layer in `dtype`, with router gate and correction bias in float32."""
    return sum(
        math.prod(shape) * (_FLOAT32_BYTES if name in FLOAT32_NAMES else dtype.itemsize)
        for name, shape in expected_layer_shapes(spec).items()
    )


def vocabulary_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of the embedding in `dtype`. An untied lm_head has as many."""
    return spec.vocab_size * spec.hidden_size * dtype.itemsize
