"""Names and shapes of a checkpoint's tensors, as MiniMax-M2's are named on the hub.

Other families' tensors have these names in mm2 too; `stored_names` translates them.

A layer's tensors are named relative to the layer (`self_attn.q_proj.weight`); `layer_prefix` makes them full.
H hidden, N heads, K kv heads, D head_dim, E experts, I intermediate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from minimax_tools.model.graph import ModelGraph, QkNorm
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
Q_NORM = "self_attn.q_norm.weight"  # [N·D], or [D] if it norms each head
K_NORM = "self_attn.k_norm.weight"  # [K·D], or [D]
INPUT_NORM = "input_layernorm.weight"  # [H]
POST_NORM = "post_attention_layernorm.weight"  # [H]
GATE = "block_sparse_moe.gate.weight"  # [E,H]
CORRECTION_BIAS = "block_sparse_moe.e_score_correction_bias"  # [E], where the graph has one

# Every expert tensor's name contains this, and no other tensor's does.
EXPERTS = ".experts."
ATTENTION_MATRICES = (Q_PROJ, K_PROJ, V_PROJ, O_PROJ)
ATTENTION_AND_NORM_NAMES = (*ATTENTION_MATRICES, Q_NORM, K_NORM, INPUT_NORM, POST_NORM)

# Where the router computes in float32, these two tensors are never rounded to the run's dtype.
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


def float32_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the tensors of a layer that are float32 in a BF16 model: those of a float32 router, or none."""
    return float32_names_of(spec.graph)


def float32_names_of(graph: ModelGraph) -> tuple[str, ...]:
    """Return `float32_names` of a graph."""
    if not graph.has_float32_router:
        return ()
    return FLOAT32_NAMES if graph.has_correction_bias else (GATE,)


def expected_layer_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors by relative name, without FP8 scales, experts in numeric order."""
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    is_per_head = spec.graph.qk_norm is QkNorm.PER_HEAD
    shapes: dict[str, tuple[int, ...]] = {
        Q_PROJ: (spec.query_width, hidden),
        K_PROJ: (spec.key_value_width, hidden),
        V_PROJ: (spec.key_value_width, hidden),
        O_PROJ: (hidden, spec.query_width),
        Q_NORM: (spec.head_dim if is_per_head else spec.query_width,),
        K_NORM: (spec.head_dim if is_per_head else spec.key_value_width,),
        INPUT_NORM: (hidden,),
        POST_NORM: (hidden,),
        GATE: (spec.num_local_experts, hidden),
    }
    if spec.graph.has_correction_bias:
        shapes[CORRECTION_BIAS] = (spec.num_local_experts,)
    for expert in range(spec.num_local_experts):
        shapes[expert_weight(expert, EXPERT_GATE)] = (intermediate, hidden)
        shapes[expert_weight(expert, EXPERT_DOWN)] = (hidden, intermediate)
        shapes[expert_weight(expert, EXPERT_UP)] = (intermediate, hidden)
    return MappingProxyType(shapes)


def layer_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of a decoder layer in `dtype`, with a float32 router in float32."""
    in_float32 = float32_names(spec)
    return sum(
        math.prod(shape) * (_FLOAT32_BYTES if name in in_float32 else dtype.itemsize)
        for name, shape in expected_layer_shapes(spec).items()
    )


def vocabulary_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of the embedding in `dtype`. An untied lm_head has as many."""
    return spec.vocab_size * spec.hidden_size * dtype.itemsize
