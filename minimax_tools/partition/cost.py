"""Costs of the parts of a model: bytes stored and loaded, parameters, FLOPs, keys, values and activations.

They follow from shapes: those of a checkpoint's headers, or of config.json alone before anything is downloaded.
N heads, K kv heads, D head_dim, E experts, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import torch

from minimax_tools.checkpoint.fp8 import scale_shape
from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.model.architecture import Architecture
from minimax_tools.model.param_mapper import ParamMapper
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    EMBEDDING,
    EXPERTS,
    FINAL_NORM,
    FLOAT32_NAMES,
    LM_HEAD,
    SCALE_SUFFIX,
    expected_layer_shapes,
    layer_prefix,
    scale_name,
)

# By their names in config.json.
_STORED_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSize:
    """Name, dtype and shape of a stored tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes on the disk."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The inputs that a model is planned for.

    Args:
        context_length: Tokens in each row.
        batch_size: Number of rows.
        dtype: Dtype of weights and activations in memory.
    """

    context_length: int
    batch_size: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.context_length * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """Cost of one part of a model, such as a layer or the embedding, or of several parts together.

    Args:
        stored_bytes: Bytes on the disk, block scales included.
        loaded_bytes: Bytes of its weights in memory.
        num_parameters: Number of weights; block scales do not count.
        flops_per_token: FLOPs of a token that attends to a whole context: two for each weight it meets, and attention.
        kv_bytes: Bytes of keys and values of all rows.
        activation_bytes: Bytes in use while it runs, beside weights, keys and values.
    """

    stored_bytes: int = 0
    loaded_bytes: int = 0
    num_parameters: int = 0
    flops_per_token: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0

    def __add__(self, other: PartCost) -> PartCost:
        """Return the cost of both parts: they run one after the other, so the larger activations count."""
        return PartCost(
            stored_bytes=self.stored_bytes + other.stored_bytes,
            loaded_bytes=self.loaded_bytes + other.loaded_bytes,
            num_parameters=self.num_parameters + other.num_parameters,
            flops_per_token=self.flops_per_token + other.flops_per_token,
            kv_bytes=self.kv_bytes + other.kv_bytes,
            activation_bytes=max(self.activation_bytes, other.activation_bytes),
        )

    def without(self, weights: PartCost) -> PartCost:
        """Return this cost without weights that were counted twice."""
        return replace(
            self,
            stored_bytes=self.stored_bytes - weights.stored_bytes,
            loaded_bytes=self.loaded_bytes - weights.loaded_bytes,
            num_parameters=self.num_parameters - weights.num_parameters,
        )

    @property
    def held_bytes(self) -> int:
        """Bytes that stay in memory: weights, keys and values."""
        return self.loaded_bytes + self.kv_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory while it runs: weights, keys, values and activations."""
        return self.held_bytes + self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Cost of each part of a model.

    Args:
        embedding: Embedding of token ids, and of positions where the model has one.
        layers: Decoder layers in order.
        final_norm: Norm behind the last layer.
        lm_head: Projection to logits; if it is tied, the embedding once more.
        rest: Other stored tensors, such as modules that predict further tokens; they go with the head.
        shared: Weights that a tied lm_head shares with the embedding, counted once if one node holds both.
        is_tied: True if the lm_head is the embedding.
        workload: Inputs that the costs are for.
    """

    embedding: PartCost
    layers: tuple[PartCost, ...]
    final_norm: PartCost
    lm_head: PartCost
    rest: PartCost = PartCost()
    shared: PartCost = PartCost()
    is_tied: bool = False
    workload: Workload

    @property
    def head(self) -> PartCost:
        """Cost of everything behind the last layer."""
        return self.final_norm + self.lm_head + self.rest

    @property
    def whole(self) -> PartCost:
        """Cost of all parts on one node."""
        return self.of_slice(range(len(self.layers)), has_embedding=True, has_head=True)

    def of_slice(self, layers: range, *, has_embedding: bool, has_head: bool) -> PartCost:
        """Return the cost of some layers in a row, with embedding and head if asked for."""
        cost = sum((self.layers[layer] for layer in layers), PartCost())
        if has_embedding:
            cost += self.embedding
        if has_head:
            cost += self.head
        return cost.without(self.shared) if has_embedding and has_head else cost


def measure_costs(
    tensors: Iterable[TensorSize | TensorEntry],
    architecture: Architecture,
    config: Mapping[str, Any],
    workload: Workload,
) -> ModelCost:
    """Compute the cost of each part of a model.

    Args:
        tensors: All tensors of the checkpoint.
        architecture: Naming of its tensors.
        config: The content of its config.json.
        workload: Inputs that the costs are for.

    Raises:
        CheckpointError: Layers are missing, or there is no embedding or final norm.
    """
    shapes = _Shapes.of(config)
    weights: dict[int | str, PartCost] = {}
    tokens_embedding = PartCost()
    for tensor in tensors:
        part = part_of(tensor.name, architecture)
        cost = _weight_cost(tensor, part, shapes, workload)
        weights[part] = weights.get(part, PartCost()) + cost
        if ParamMapper.is_token_embedding(tensor.name, architecture):
            tokens_embedding += cost
    num_layers = _count_layers(weights, architecture)
    is_tied = PART_HEAD not in weights
    lm_head = tokens_embedding if is_tied else weights[PART_HEAD]
    running = shapes.layer_running_cost(workload)
    return ModelCost(
        embedding=weights[PART_EMBEDDING] + shapes.embedding_running_cost(workload),
        layers=tuple(weights[layer] + running for layer in range(num_layers)),
        final_norm=weights[PART_NORM],
        lm_head=lm_head + shapes.lm_head_running_cost(lm_head.num_parameters, workload),
        rest=weights.get(PART_REST, PartCost()),
        shared=tokens_embedding if is_tied else PartCost(),
        is_tied=is_tied,
        workload=workload,
    )


def _count_layers(parts: Container[int | str], architecture: Architecture) -> int:
    """Return the number of layers, if none is missing and there are an embedding and a final norm."""
    num_layers = architecture.num_layers
    if num_layers is None:
        num_layers = next(layer for layer in count() if layer not in parts)
    missing = [f"layer {layer}" for layer in range(num_layers) if layer not in parts]
    missing += [] if num_layers else ["any layer"]
    missing += [f"the {part}" for part in (PART_EMBEDDING, PART_NORM) if part not in parts]
    if missing:
        raise CheckpointError(
            "the checkpoint is not whole",
            found="no tensor of " + list_faults(missing),
            next_step="Fetch it again, or check num_hidden_layers in its config.json.",
        )
    return num_layers


PART_EMBEDDING, PART_NORM, PART_HEAD, PART_REST = "embedding", "final norm", "lm_head", "rest"


def part_of(name: str, architecture: Architecture) -> int | str:
    """Return the part that a tensor belongs to: a layer's number, `embedding`, `final norm`, `lm_head`, or `rest`.

    The rest, such as modules that predict further tokens, goes with the head.
    """
    layer = ParamMapper.get_layer_number(name, architecture)
    if layer is not None:
        return layer
    if ParamMapper.is_embedding(name, architecture):
        return PART_EMBEDDING
    if ParamMapper.is_final_norm(name, architecture):
        return PART_NORM
    return PART_HEAD if ParamMapper.is_lm_head(name, architecture) else PART_REST


def expected_tensors(spec: ModelSpec) -> Iterable[TensorSize]:
    """Yield the tensors of a MiniMax-M2 by its config.json alone, with block scales if the weights are FP8."""
    is_fp8 = (spec.raw.get("quantization_config") or {}).get("quant_method") == "fp8"
    plain = _STORED_DTYPES.get(str(spec.raw.get("dtype") or spec.raw.get("torch_dtype")), torch.bfloat16)
    vocabulary = (spec.vocab_size, spec.hidden_size)
    yield TensorSize(name=EMBEDDING, dtype=plain, shape=vocabulary)
    yield TensorSize(name=FINAL_NORM, dtype=plain, shape=(spec.hidden_size,))
    if not spec.tie_word_embeddings:
        yield TensorSize(name=LM_HEAD, dtype=plain, shape=vocabulary)
    for layer in range(spec.num_hidden_layers):
        for relative, shape in expected_layer_shapes(spec).items():
            name = layer_prefix(layer) + relative
            if relative in FLOAT32_NAMES:
                yield TensorSize(name=name, dtype=torch.float32, shape=shape)
            elif is_fp8 and len(shape) == 2:
                yield TensorSize(name=name, dtype=torch.float8_e4m3fn, shape=shape)
                yield TensorSize(name=scale_name(name), dtype=torch.float32, shape=scale_shape(shape))
            else:
                yield TensorSize(name=name, dtype=plain, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    """Sizes from config.json that no weight shows; zero for those that another model's config lacks."""

    hidden_size: int
    query_width: int
    key_value_width: int
    vocab_size: int
    intermediate_size: int
    num_experts_per_tok: int
    num_experts: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Shapes:
        hidden_size = _first(config, "hidden_size", "n_embd")
        num_heads = _first(config, "num_attention_heads", "n_head")
        head_dim = _first(config, "head_dim") or hidden_size // max(num_heads, 1)
        return cls(
            hidden_size=hidden_size,
            query_width=num_heads * head_dim,
            key_value_width=(_first(config, "num_key_value_heads") or num_heads) * head_dim,
            vocab_size=_first(config, "vocab_size"),
            intermediate_size=_first(config, "intermediate_size", "n_inner") or 4 * hidden_size,
            num_experts_per_tok=_first(config, "num_experts_per_tok") or 1,
            num_experts=_first(config, "num_local_experts", "num_experts") or 1,
        )

    def layer_running_cost(self, workload: Workload) -> PartCost:
        """Return a layer's cost beside its weights: attention, keys and values, activations.

        Attention scores are taken as never held whole in memory.
        """
        widths = 6 * self.hidden_size + 3 * self.query_width + 4 * self.key_value_width
        routed = self.num_experts_per_tok * (2 * self.hidden_size + 3 * self.intermediate_size)
        itemsize = workload.dtype.itemsize
        return PartCost(
            # Scores, and the values weighted by them: two operations for each of N·D numbers, twice.
            flops_per_token=4 * self.query_width * workload.context_length,
            kv_bytes=2 * self.key_value_width * workload.num_tokens * itemsize,
            activation_bytes=(widths + routed) * workload.num_tokens * itemsize,
        )

    def lm_head_running_cost(self, num_parameters: int, workload: Workload) -> PartCost:
        """Return the cost of the product and of the logits of all tokens, also with a tied embedding's weights."""
        return PartCost(
            flops_per_token=2 * num_parameters,
            activation_bytes=self.vocab_size * workload.num_tokens * workload.dtype.itemsize,
        )

    def embedding_running_cost(self, workload: Workload) -> PartCost:
        return PartCost(activation_bytes=self.hidden_size * workload.num_tokens * workload.dtype.itemsize)


def _weight_cost(
    tensor: TensorSize | TensorEntry, part: int | str, shapes: _Shapes, workload: Workload
) -> PartCost:
    if tensor.name.endswith(SCALE_SUFFIX):
        # Block scales are multiplied in when the weight is loaded.
        return PartCost(stored_bytes=tensor.size_bytes)
    num_parameters = math.prod(tensor.shape)
    is_float32 = any(tensor.name.endswith("." + name) for name in FLOAT32_NAMES)
    loaded = torch.float32 if is_float32 else workload.dtype
    if not tensor.dtype.is_floating_point:
        loaded = tensor.dtype
    flops = 0
    if isinstance(part, int) and len(tensor.shape) > 1:
        flops = 2 * num_parameters
        if EXPERTS in tensor.name:
            flops = flops * shapes.num_experts_per_tok // shapes.num_experts
    return PartCost(
        stored_bytes=tensor.size_bytes,
        loaded_bytes=num_parameters * loaded.itemsize,
        num_parameters=num_parameters,
        flops_per_token=flops,
    )


def _first(config: Mapping[str, Any], *keys: str) -> int:
    found = next((config[key] for key in keys if config.get(key) is not None), 0)
    return int(found)
