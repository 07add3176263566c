"""ModelMemory: the bytes of a checkpoint by dtype, and what its parts take in memory in BF16 and in float32."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.model.architecture import Architecture, part_of
from minimax_tools.model.weight_names import EXPERTS, SCALE_SUFFIX
from minimax_tools.partition.cost import ModelCost, Workload, measure_costs
from minimax_tools.stored_dtype import BFLOAT16, FLOAT32, StoredDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeShare:
    """The tensors of a checkpoint that are stored in one dtype."""

    dtype: str
    num_tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartMemory:
    """Bytes of a part of a model; the router's gate and correction bias are float32 in both dtypes."""

    stored_bytes: int  # on the disk, block scales included
    bfloat16_bytes: int
    float32_bytes: int

    def __add__(self, other: PartMemory) -> PartMemory:
        """Return the bytes of both."""
        return PartMemory(
            stored_bytes=self.stored_bytes + other.stored_bytes,
            bfloat16_bytes=self.bfloat16_bytes + other.bfloat16_bytes,
            float32_bytes=self.float32_bytes + other.float32_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """Bytes of a port's conversion that stacks the experts of a layer into fused tensors.

    FP8 weights times their float32 scales are float32. A conversion that does not cast the product keeps all experts
    in float32.
    """

    layer_experts: PartMemory  # experts of the largest layer
    peak_layer: PartMemory  # that layer, and its experts once more while they are stacked
    model: PartMemory  # the whole model, experts stacked


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The memory of a model."""

    dtypes: tuple[DtypeShare, ...]  # largest first
    parts: Mapping[str, PartMemory]  # embedding, layers 0 to N-1, final_norm, lm_head, rest
    total: PartMemory
    regrouping: Regrouping | None  # None for a model without experts

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return sum(name.startswith("layer_") for name in self.parts)

    @classmethod
    def of(
        cls, tensors: Iterable[TensorSize], architecture: Architecture, config: Mapping[str, Any]
    ) -> ModelMemory:
        """Measure a checkpoint by all of its tensors.

        Raises:
            CheckpointError: Layers are missing, or there is no embedding or final norm.
        """
        tensors = tuple(tensors)
        costs = tuple(
            measure_costs(tensors, architecture, config, Workload(context_length=1, dtype=dtype))
            for dtype in (BFLOAT16, FLOAT32)
        )
        parts = _name_parts(*costs)
        total = sum(parts.values(), start=_NOTHING)
        return cls(
            dtypes=_count_dtypes(tensors),
            parts=parts,
            total=total,
            regrouping=_measure_regrouping(tensors, architecture, parts, total),
        )


_NOTHING = PartMemory(stored_bytes=0, bfloat16_bytes=0, float32_bytes=0)


def _count_dtypes(tensors: tuple[TensorSize, ...]) -> tuple[DtypeShare, ...]:
    numbers, sizes = Counter[StoredDtype](), Counter[StoredDtype]()
    for tensor in tensors:
        numbers[tensor.dtype] += 1
        sizes[tensor.dtype] += tensor.size_bytes
    return tuple(
        DtypeShare(dtype=dtype.name, num_tensors=numbers[dtype], size_bytes=size)
        for dtype, size in sizes.most_common()
    )


def _name_parts(bfloat16: ModelCost, float32: ModelCost) -> dict[str, PartMemory]:
    """Return the parts by name; a tied lm_head is the embedding, and a model without other tensors has no rest."""
    names = [
        "embedding",
        *(f"layer_{layer}" for layer in range(len(bfloat16.layers))),
        "final_norm",
        "lm_head",
        "rest",
    ]
    halves, wholes = (
        (cost.embedding, *cost.layers, cost.final_norm, cost.lm_head, cost.rest)
        for cost in (bfloat16, float32)
    )
    return {
        name: PartMemory(
            stored_bytes=half.stored_bytes, bfloat16_bytes=half.loaded_bytes, float32_bytes=whole.loaded_bytes
        )
        for name, half, whole in zip(names, halves, wholes, strict=True)
        if not (name == "lm_head" and bfloat16.is_tied) and (name != "rest" or half.stored_bytes)
    }


def _measure_regrouping(
    tensors: tuple[TensorSize, ...],
    architecture: Architecture,
    parts: Mapping[str, PartMemory],
    total: PartMemory,
) -> Regrouping | None:
    experts: Counter[int | str] = Counter()
    stored: Counter[int | str] = Counter()
    for tensor in tensors:
        if EXPERTS not in tensor.name:
            continue
        part = part_of(tensor.name, architecture)
        stored[part] += tensor.size_bytes
        if not tensor.name.endswith(SCALE_SUFFIX):
            experts[part] += math.prod(tensor.shape)
    layers = {part: number for part, number in experts.items() if isinstance(part, int)}
    if not layers:
        return None
    largest = max(layers, key=lambda part: layers[part])
    weights = PartMemory(
        stored_bytes=stored[largest],
        bfloat16_bytes=layers[largest] * BFLOAT16.itemsize,
        float32_bytes=layers[largest] * FLOAT32.itemsize,
    )
    return Regrouping(layer_experts=weights, peak_layer=parts[f"layer_{largest}"] + weights, model=total)
