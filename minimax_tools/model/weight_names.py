"""Names and shapes of a checkpoint's tensors, as MiniMax-M2's are named on the hub.

Other families' tensors have these names in mm2 too; `stored_names` translates them.

A layer's tensors are named relative to the layer (`self_attn.q_proj.weight`); `layer_prefix` makes them full.
H hidden, N heads, K kv heads, D head_dim, E experts, I intermediate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from minimax_tools.model.graph import LayerGraph, ModelGraph, QkNorm
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
Q_BIAS = "self_attn.q_proj.bias"  # [N·D]; this and the next three where the graph has them
K_BIAS = "self_attn.k_proj.bias"  # [K·D]
V_BIAS = "self_attn.v_proj.bias"  # [K·D]
O_BIAS = "self_attn.o_proj.bias"  # [H]
GATE = "block_sparse_moe.gate.weight"  # [E,H]
CORRECTION_BIAS = "block_sparse_moe.e_score_correction_bias"  # [E], where the graph has one

# Every routed expert tensor's name contains this, and no other tensor's does.
EXPERTS = ".experts."
# Of the shared expert of width W, and of the dense MLP in place of experts: [W,H], [W,H], [H,W].
SHARED_GATE = "block_sparse_moe.shared_experts.gate_proj.weight"
SHARED_UP = "block_sparse_moe.shared_experts.up_proj.weight"
SHARED_DOWN = "block_sparse_moe.shared_experts.down_proj.weight"
DENSE_GATE = "mlp.gate_proj.weight"
DENSE_UP = "mlp.up_proj.weight"
DENSE_DOWN = "mlp.down_proj.weight"
# What a sparse layer chooses its keys by: queries [heads·D,H], keys [D,H], and their norms [D] each
INDEXER = tuple(f"self_attn.index_{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm"))
ATTENTION_MATRICES = (Q_PROJ, K_PROJ, V_PROJ, O_PROJ)

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


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Names of the weights of an expert, or of another MLP, relative to the layer."""

    gate: str
    up: str
    down: str

    @classmethod
    def of_expert(cls, number: int) -> MlpNames:
        """Return the names of a routed expert's weights."""
        return cls(*(expert_weight(number, name) for name in (EXPERT_GATE, EXPERT_UP, EXPERT_DOWN)))


SHARED_MLP = MlpNames(SHARED_GATE, SHARED_UP, SHARED_DOWN)
DENSE_MLP = MlpNames(DENSE_GATE, DENSE_UP, DENSE_DOWN)


def module_weights(spec: ModelSpec, layer: int) -> Mapping[str, tuple[str, ...]]:
    """Return what each parameter or buffer of transformers' decoder layer holds, routed experts aside, by its name.

    Of several tensors that it fuses the rows lie one after the other.
    """
    held: dict[str, tuple[str, ...]] = {}
    for name in expected_layer_shapes(spec, layer):
        if EXPERTS in name:
            continue
        module = spec.family.module_names.stored(name)
        if spec.family.fuses_gate_up:
            module = module.replace("gate_proj", "gate_up_proj").replace(".up_proj", ".gate_up_proj")
        held[module] = (*held.get(module, ()), name)
    # Gate comes before down and up in a layer's tensors.
    return MappingProxyType(held)


def float32_places(spec: ModelSpec, layer: int) -> Iterator[tuple[str, str, str]]:
    """Yield the tensors of a layer that stay float32: mm2's name, and module and attribute in transformers' layer."""
    shapes = expected_layer_shapes(spec, layer)
    for name in float32_names(spec.graph):
        if name in shapes:
            path, _, attribute = spec.family.module_names.stored(name).rpartition(".")
            yield name, path, attribute


def bias_name(graph: ModelGraph, weight: str) -> str | None:
    """Return the name of the bias that belongs to a projection of attention; None if the graph has none."""
    if weight == O_PROJ:
        return O_BIAS if graph.has_output_bias else None
    return {Q_PROJ: Q_BIAS, K_PROJ: K_BIAS, V_PROJ: V_BIAS}.get(weight) if graph.has_qkv_bias else None


def scale_name(weight_name: str) -> str:
    """Return the name of an FP8 weight's float32 block scales."""
    return weight_name + "_scale_inv"


def float32_names(graph: ModelGraph) -> tuple[str, ...]:
    """Return the tensors of a layer that are float32 in a BF16 model: those of a float32 router, or none."""
    if not graph.has_float32_router:
        return ()
    return FLOAT32_NAMES if graph.has_correction_bias else (GATE,)


def expected_layer_shapes(spec: ModelSpec, layer: int) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors by relative name, without FP8 scales, experts in numeric order."""
    hidden, graph = spec.hidden_size, spec.graph
    shapes: dict[str, tuple[int, ...]] = {
        Q_PROJ: (spec.query_width, hidden),
        K_PROJ: (spec.key_value_width, hidden),
        V_PROJ: (spec.key_value_width, hidden),
        O_PROJ: (hidden, spec.query_width),
    }
    if graph.has_qkv_bias:
        shapes |= {
            Q_BIAS: (spec.query_width,),
            K_BIAS: (spec.key_value_width,),
            V_BIAS: (spec.key_value_width,),
        }
    if graph.has_output_bias:
        shapes[O_BIAS] = (hidden,)
    if graph.qk_norm is QkNorm.PER_HEAD:
        shapes |= {Q_NORM: (spec.head_dim,), K_NORM: (spec.head_dim,)}
    elif graph.qk_norm is QkNorm.ALL_HEADS:
        shapes |= {Q_NORM: (spec.query_width,), K_NORM: (spec.key_value_width,)}
    shapes |= {INPUT_NORM: (hidden,), POST_NORM: (hidden,)}
    if graph.layer(layer).is_sparse and graph.sparsity is not None:
        width, dim = graph.sparsity.num_heads * graph.sparsity.head_dim, graph.sparsity.head_dim
        shapes |= dict(zip(INDEXER, ((width, hidden), (dim, hidden), (dim,), (dim,)), strict=True))
    if graph.layer(layer).is_dense:
        shapes |= _mlp_shapes((DENSE_GATE, DENSE_DOWN, DENSE_UP), hidden, graph.dense_width)
        return MappingProxyType(shapes)
    shapes[GATE] = (spec.num_local_experts, hidden)
    if graph.has_correction_bias:
        shapes[CORRECTION_BIAS] = (spec.num_local_experts,)
    if graph.shared_width:
        shapes |= _mlp_shapes((SHARED_GATE, SHARED_DOWN, SHARED_UP), hidden, graph.shared_width)
    for expert in range(spec.num_local_experts):
        names = [expert_weight(expert, matrix) for matrix in EXPERT_MATRICES]
        shapes |= _mlp_shapes(names, hidden, spec.intermediate_size)
    return MappingProxyType(shapes)


def _mlp_shapes(names: Sequence[str], hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of gate, down and up, whose names these are."""
    gate, down, up = names
    return {gate: (width, hidden), down: (hidden, width), up: (width, hidden)}


def layer_bytes(spec: ModelSpec, dtype: torch.dtype, layer: int | None = None) -> int:
    """Return the bytes of a decoder layer in `dtype`, with a float32 router in float32; None for the largest layer."""
    layers = one_layer_of_each_kind(spec) if layer is None else (layer,)
    return max(_layer_bytes(spec, number, dtype) for number in layers)


def one_layer_of_each_kind(spec: ModelSpec) -> tuple[int, ...]:
    """Return the first layer of each kind that the model has."""
    kinds: dict[LayerGraph, int] = {}
    for layer in range(spec.num_hidden_layers):
        kinds.setdefault(spec.graph.layer(layer), layer)
    return tuple(sorted(kinds.values()))


def _layer_bytes(spec: ModelSpec, layer: int, dtype: torch.dtype) -> int:
    in_float32 = float32_names(spec.graph)
    return sum(
        math.prod(shape) * (_FLOAT32_BYTES if name in in_float32 else dtype.itemsize)
        for name, shape in expected_layer_shapes(spec, layer).items()
    )


def vocabulary_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of the embedding in `dtype`. An untied lm_head has as many."""
    return spec.vocab_size * spec.hidden_size * dtype.itemsize
