"""ModelCost: bytes, parameters, FLOPs, keys, values and activations of a model's parts, from shapes and config.json."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.model.architecture import (
    PART_EMBEDDING,
    PART_HEAD,
    PART_NORM,
    PART_REST,
    Architecture,
    ParamMapper,
    part_of,
)
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.weight_names import EXPERTS, SCALE_SUFFIX, float32_names
from minimax_tools.stored_dtype import BFLOAT16, FLOAT32, StoredDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The inputs that a model is planned for."""

    context_length: int  # tokens in each row
    batch_size: int = 1  # number of rows
    dtype: StoredDtype = BFLOAT16  # of weights and activations in memory

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.context_length * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """Cost of one or several parts of a model, such as a layer or the embedding."""

    stored_bytes: int = 0  # on the disk, block scales included
    loaded_bytes: int = 0  # weights in memory
    num_parameters: int = 0  # number of weights; block scales do not count
    flops_per_token: int = 0  # two for each weight that multiplies a token, and attention to a whole context
    kv_bytes: int = 0  # keys and values of all rows
    activation_bytes: int = 0  # in use while it runs, beside weights, keys and values

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
        """Return this cost less `weights`: those that were counted twice."""
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
    """Cost of each part of a model."""

    embedding: PartCost  # embeddings of token ids and, if the model has them, of positions
    layers: tuple[PartCost, ...]  # decoder layers in order
    final_norm: PartCost  # norm behind the last layer
    lm_head: PartCost  # projection to logits; if it is tied, the token embedding once more
    # Other stored tensors, such as modules that predict further tokens. They go with the head.
    rest: PartCost = PartCost()
    # Token embedding that a tied lm_head shares. A node that holds both holds it once.
    shared: PartCost = PartCost()
    is_tied: bool = False  # True if the lm_head is the embedding
    workload: Workload  # inputs that the costs are for

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
    tensors: Iterable[TensorSize],
    architecture: Architecture,
    config: Mapping[str, Any],
    workload: Workload,
) -> ModelCost:
    """Compute the cost of each part of a model, from all tensors of its checkpoint and its config.json.

    Raises:
        CheckpointError: Layers are missing, or there is no embedding or final norm.
    """
    sizes = _ConfigSizes.of(config)
    parts: dict[int | str, list[TensorSize]] = {}
    for tensor in tensors:
        parts.setdefault(part_of(tensor.name, architecture), []).append(tensor)
    costs = {part: _weights_cost(held, part, sizes, workload) for part, held in parts.items()}
    token_embeddings = [
        tensor
        for tensor in parts.get(PART_EMBEDDING, ())
        if ParamMapper.is_token_embedding(tensor.name, architecture)
    ]
    token_embedding = _weights_cost(token_embeddings, PART_EMBEDDING, sizes, workload)
    num_layers = _count_layers(costs, architecture)
    is_tied = PART_HEAD not in costs
    lm_head = token_embedding if is_tied else costs[PART_HEAD]
    layer_running_cost = sizes.layer_running_cost(workload)
    # Bytes of one value for each token.
    column_bytes = workload.num_tokens * workload.dtype.itemsize
    return ModelCost(
        embedding=costs[PART_EMBEDDING] + PartCost(activation_bytes=sizes.hidden_size * column_bytes),
        layers=tuple(costs[layer] + layer_running_cost for layer in range(num_layers)),
        final_norm=costs[PART_NORM],
        # Also if it is tied, lm_head is multiplied, and gives the logits of all tokens.
        lm_head=lm_head
        + PartCost(
            flops_per_token=2 * lm_head.num_parameters, activation_bytes=sizes.vocab_size * column_bytes
        ),
        rest=costs.get(PART_REST, PartCost()),
        shared=token_embedding if is_tied else PartCost(),
        is_tied=is_tied,
        workload=workload,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConfigSizes:
    """Sizes from config.json, under any of their usual names. A missing width is 0, a missing number of experts 1."""

    hidden_size: int
    query_width: int
    key_value_width: int
    vocab_size: int
    intermediate_size: int
    num_experts_per_tok: int
    num_experts: int
    float32_endings: tuple[str, ...]  # of the names of tensors that are float32 in a model of any dtype

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _ConfigSizes:
        hidden_size = _first_value(config, "hidden_size", "n_embd")
        num_heads = _first_value(config, "num_attention_heads", "n_head")
        head_dim = _first_value(config, "head_dim") or hidden_size // max(num_heads, 1)
        return cls(
            hidden_size=hidden_size,
            query_width=num_heads * head_dim,
            key_value_width=(_first_value(config, "num_key_value_heads") or num_heads) * head_dim,
            vocab_size=_first_value(config, "vocab_size"),
            intermediate_size=_first_value(config, "moe_intermediate_size", "intermediate_size", "n_inner")
            or 4 * hidden_size,
            num_experts_per_tok=_first_value(config, "num_experts_per_tok") or 1,
            num_experts=_first_value(config, "num_local_experts", "num_experts") or 1,
            float32_endings=tuple(f".{name}" for name in _float32_names(config)),
        )

    def layer_running_cost(self, workload: Workload) -> PartCost:
        """Return a layer's cost beside its weights: attention, keys and values, activations.

        Attention is taken to run in blocks, so the scores of a whole context do not count as activations.
        """
        # Values held at once for each token, an estimate: six tensors of the hidden width, three as wide as the
        # queries and four as wide as the keys.
        block_values = 6 * self.hidden_size + 3 * self.query_width + 4 * self.key_value_width
        # Input and output of each expert that the token is routed to, and gate, up and their product.
        expert_values = self.num_experts_per_tok * (2 * self.hidden_size + 3 * self.intermediate_size)
        itemsize = workload.dtype.itemsize
        return PartCost(
            # Per key: a product and a sum for each of N·D numbers, once for the score and once for the value.
            flops_per_token=4 * self.query_width * workload.context_length,
            kv_bytes=2 * self.key_value_width * workload.num_tokens * itemsize,
            activation_bytes=(block_values + expert_values) * workload.num_tokens * itemsize,
        )


def _float32_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the stored names of a float32 router; none if mm2 does not know the family."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None:
        yield from map(family.stored_names.stored, float32_names(family.read_graph(config)))


def _first_value(config: Mapping[str, Any], *keys: str) -> int:
    """Return the value of the first key that the config has; 0 if it has none."""
    for key in keys:
        if config.get(key) is not None:
            return int(config[key])
    return 0


def _weights_cost(
    tensors: Iterable[TensorSize], part: int | str, sizes: _ConfigSizes, workload: Workload
) -> PartCost:
    """Compute the cost of one part's tensors, of which a checkpoint has 100 000."""
    stored_bytes = loaded_bytes = num_parameters = flops = 0
    for tensor in tensors:
        stored_bytes += tensor.size_bytes
        if tensor.name.endswith(SCALE_SUFFIX):
            # Block scales are multiplied into their weight when it is loaded: they take no memory afterwards.
            continue
        size = math.prod(tensor.shape)
        num_parameters += size
        loaded_bytes += size * _loaded_dtype(tensor, sizes, workload).itemsize
        # Only matrices of layers are multiplied; the embedding is looked up, and `measure_costs` counts lm_head.
        if isinstance(part, int) and len(tensor.shape) > 1:
            # On average: a token goes through some of the experts only.
            is_expert = EXPERTS in tensor.name
            flops += 2 * size * sizes.num_experts_per_tok // sizes.num_experts if is_expert else 2 * size
    return PartCost(
        stored_bytes=stored_bytes,
        loaded_bytes=loaded_bytes,
        num_parameters=num_parameters,
        flops_per_token=flops,
    )


def _loaded_dtype(tensor: TensorSize, sizes: _ConfigSizes, workload: Workload) -> StoredDtype:
    if not tensor.dtype.is_floating_point:
        return tensor.dtype
    return FLOAT32 if tensor.name.endswith(sizes.float32_endings) else workload.dtype


def _count_layers(parts: Container[int | str], architecture: Architecture) -> int:
    """Return the number of layers, after checking that no layer, embedding or final norm is missing."""
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
