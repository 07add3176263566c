"""`mm2-split memory`: the bytes of a checkpoint by dtype, and what its parts take in memory in BF16 and in float32."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import click

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text
from minimax_tools.command_line.options import model_option, output_options
from minimax_tools.errors import format_count
from minimax_tools.machine.size import format_size
from minimax_tools.machine.streams import align_columns
from minimax_tools.model.architecture import Architecture, part_of
from minimax_tools.model.weight_names import EXPERTS, SCALE_SUFFIX
from minimax_tools.partition.cost import ModelCost, Workload, measure_costs
from minimax_tools.stored_dtype import BFLOAT16, FLOAT32, StoredDtype

_STACKED = ("stacking a layer's experts", "held to BF16", "left in float32")


@click.command("memory", cls=Mm2Command, epilog="\b\nExample: mm2-split memory --model MiniMaxAI/MiniMax-M2")
@model_option
@output_options
def memory_command(model: str, as_json: bool) -> None:
    """Print what a checkpoint takes: bytes by dtype, each layer and all of it in BF16 and in float32.

    Only headers and config.json are read. The last lines are about ports that stack the experts of a layer: their
    memory, if the stacked weights are held to BF16, and if they are left in float32.
    """
    with loading():
        from minimax_tools.slices.source import open_source

    source = open_source(model, headers=True)
    memory = ModelMemory.of(source.tensors, source.architecture, source.config)
    has_headers = source.entries is not None
    if as_json:
        print_json(_record(source.model, memory, has_headers=has_headers), next_commands=())
    else:
        print_text(_render(source.model, memory, has_headers=has_headers), next_commands=())


def _record(model: str, memory: ModelMemory, *, has_headers: bool) -> dict[str, Any]:
    from minimax_tools.json_codec import encode

    return {"model": model, "from": "headers" if has_headers else "config.json", **encode(memory)}


def _render(model: str, memory: ModelMemory, *, has_headers: bool) -> str:
    known = "its headers" if has_headers else "config.json: the headers are not known"
    lines = [f"{model}: {format_count(memory.num_layers, 'layer')}, by {known}", ""]
    dtypes = [(one.dtype, str(one.num_tensors), format_size(one.size_bytes)) for one in memory.dtypes]
    lines += [*_table(("stored in", "tensors", "bytes"), dtypes), ""]
    parts = [(name, *_sizes(part)) for name, part in (*_name_groups(memory), ("in all", memory.total))]
    lines += _table(("part", "stored", "in BF16", "in float32"), parts)
    if memory.regrouping is not None:
        regrouping = memory.regrouping
        stacked = {
            "experts of a layer": regrouping.layer_experts,
            "the layer, and its experts once more": regrouping.peak_layer,
            "all layers, if they are kept": regrouping.model,
        }
        lines += ["", *_table(_STACKED, [(name, *_sizes(part)[1:]) for name, part in stacked.items()])]
        lines += [
            "",
            "An FP8 weight times its float32 scale is float32: cast the product to BF16 before stacking.",
        ]
    return "\n".join(lines)


def _name_groups(memory: ModelMemory) -> Iterator[tuple[str, PartMemory]]:
    """Yield the parts; consecutive layers that take the same are one line, with the bytes of each."""
    for part, group in groupby(memory.parts.items(), key=lambda item: item[1]):
        names = [name for name, _ in group]
        layers = [name.removeprefix("layer_") for name in names if name.startswith("layer_")]
        for name in names:
            if name not in (f"layer_{layer}" for layer in layers):
                yield name, part
        if len(layers) == 1:
            yield f"layer {layers[0]}", part
        elif layers:
            yield f"each of layers {layers[0]} to {layers[-1]}", part


def _sizes(part: PartMemory) -> tuple[str, str, str]:
    return format_size(part.stored_bytes), format_size(part.bfloat16_bytes), format_size(part.float32_bytes)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in align_columns([titles, *rows], words=titles[:1])]


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
        total = sum(parts.values(), start=PartMemory(stored_bytes=0, bfloat16_bytes=0, float32_bytes=0))
        return cls(
            dtypes=_count_dtypes(tensors),
            parts=parts,
            total=total,
            regrouping=_measure_regrouping(tensors, architecture, parts, total),
        )


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
