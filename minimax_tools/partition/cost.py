"""ModelCost: bytes stored and loaded, parameters, FLOPs, keys, values and activations of a model's parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minimax_tools.stored_dtype import BFLOAT16, StoredDtype


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
