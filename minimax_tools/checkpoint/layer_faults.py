"""Faults of a layer in a checkpoint: tensors that do not fit config.json, told by their cause where one explains all.

Derived checkpoints are published in many forms: quantised and packed, renamed, with experts pruned. Their headers tell
which; a list of a thousand names does not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import WEIGHT_DTYPES, TensorIndex, find_scale
from minimax_tools.errors import CheckpointError, list_faults
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.quantisation import BLOCK_SIZE, original_step
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    FLOAT32_NAMES,
    GATE,
    expected_layer_shapes,
    layer_prefix,
    scale_name,
)
from minimax_tools.stored_dtype import FLOAT8_E4M3FN, FLOAT32

logger = logging.getLogger(__name__)

_EXPERT = re.compile(r"\.experts\.\d+\.")
# Endings of tensors that hold a quantised weight, or what is needed to undo it, in formats that mm2 does not read.
_PACKED = re.compile(
    r"\.(qweight|qzeros|g_idx|scales|biases|weight_packed|weight_shape|weight_scale(_2)?|input_scale|weight_zero_point|"
    r"tq_packed|tq_norms|weight_absmax|absmax|quant_map|trellis|suh|svh)$"
)
_FUSED = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
_ROUTER_PARTS = {GATE: "gate", CORRECTION_BIAS: "correction bias"}
_FETCH_STEP = "Check that config.json belongs to these shards, and fetch what is missing."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """A cause that explains all faults of a layer."""

    found: str
    next_step: str


def verify_layer(index: TensorIndex, spec: ModelSpec, layer: int) -> None:
    """Check by the headers alone that `index` holds all tensors of a decoder layer and no others of it.

    Raises:
        CheckpointError: A tensor or its scales are missing, have another shape or an unreadable dtype, or the layer
            holds a tensor that no model of its family has.
    """
    prefix = layer_prefix(layer)
    unexpected = set(index.layer_names(layer))  # expected names are taken out below
    faults = []
    for name, shape in expected_layer_shapes(spec, layer).items():
        full_name = prefix + name
        if full_name not in unexpected:
            faults.append(f"{full_name}: expected {list(shape)}, found nothing")
            continue
        unexpected.remove(full_name)
        entry = index[full_name]
        if entry.shape != shape:
            faults.append(f"{full_name}: expected {list(shape)}, found {list(entry.shape)}")
        if entry.dtype not in WEIGHT_DTYPES:
            faults.append(f"{full_name}: found dtype {entry.dtype}, which mm2 cannot read as a weight")
        if entry.dtype == FLOAT8_E4M3FN:
            unexpected.discard(scale_name(full_name))
            faults += _scale_faults(index, entry)
    faults += [f"{name}: no {spec.family.title} layer has it" for name in sorted(unexpected)]
    if not faults:
        return
    cause = _find_cause(index, spec, layer, unexpected)
    raise CheckpointError(
        f"layer {layer} of the checkpoint at {index.folder} is not the one config.json describes",
        found=list_faults(_join_alike(faults)) if cause is None else cause.found,
        next_step=_FETCH_STEP if cause is None else cause.next_step,
    )


def describe_rounded_router(entries: Mapping[str, TensorEntry], graph: ModelGraph) -> str:
    """Return in which dtypes the headers hold a float32 router, if in others, and what that does; empty otherwise."""
    if not graph.has_float32_router:
        return ""
    held: dict[str, str] = {}
    for name, entry in entries.items():
        part = next((text for ending, text in _ROUTER_PARTS.items() if name.endswith(ending)), None)
        if part is not None and entry.dtype != FLOAT32:
            held.setdefault(part, entry.dtype.name)
    if not held:
        return ""
    parts = " and ".join(f"{part} in {dtype}" for part, dtype in held.items())
    return (
        f"the checkpoint holds the router's {parts}, the originals hold it in float32: tokens at near ties go to other "
        "experts (near 9 a bfloat16 is 0.06 from the next). Golden and port of this checkpoint agree on them, and "
        "neither gives the original model's logits"
    )


def warn_of_rounded_router(entries: Mapping[str, TensorEntry], graph: ModelGraph) -> None:
    """Log what `describe_rounded_router` returns, if anything."""
    if rounded := describe_rounded_router(entries, graph):
        logger.warning("%s%s.", rounded[0].upper(), rounded[1:])


def _find_cause(
    index: TensorIndex, spec: ModelSpec, layer: int, unexpected: Collection[str]
) -> _Cause | None:
    """Return the cause that explains the faults of a layer; None if none of the known ones does."""
    prefix = layer_prefix(layer)
    entries = [index[name] for name in index.layer_names(layer)]
    fused = next((name for name in unexpected if _FUSED.search(name)), None)
    if fused is not None:
        return _Cause(
            found=f"names of transformers 5, such as {fused}",
            next_step="Save it by save_pretrained of a transformers that writes the hub's names, one tensor for each "
            "expert under block_sparse_moe.",
        )
    bare = next(
        (
            entry.name
            for entry in entries
            if entry.dtype == FLOAT8_E4M3FN and scale_name(entry.name) not in index
        ),
        None,
    )
    if bare is not None and f"{bare}_scale" in index:
        shape = list(index[f"{bare}_scale"].shape)
        return _Cause(
            found=f"FP8 whose scales have another name and form: {bare}_scale {shape}, for {scale_name(bare)} with one "
            f"scale per {BLOCK_SIZE} × {BLOCK_SIZE} block",
            next_step=original_step(spec.raw),
        )
    packed = next((name for name in sorted(unexpected) if _PACKED.search(name)), None)
    if packed is not None:
        return _Cause(
            found=f"weights packed in a format that config.json does not name: {packed}, {index[packed].dtype}",
            next_step=original_step(spec.raw),
        )
    sizes = {name: index[prefix + name].shape[0] for name in FLOAT32_NAMES if prefix + name in index}
    if any(size != spec.num_local_experts for size in sizes.values()):
        found = " and ".join(f"{_ROUTER_PARTS[name]} for {size} experts" for name, size in sizes.items())
        number = sizes.get(GATE, 0)
        is_config = set(sizes.values()) == {number}
        return _Cause(
            found=f"{found}, where config.json says num_local_experts {spec.num_local_experts}: experts were pruned",
            next_step=(
                f"Write num_local_experts {number} into a copy of config.json."
                if is_config
                else "Fetch a copy whose gate and correction bias were pruned with the experts."
            ),
        )
    return None


def _join_alike(faults: Sequence[str]) -> list[str]:
    """Join faults that differ in the number of an expert alone into the first of them, with their number."""
    alike: dict[str, list[str]] = {}
    for fault in faults:
        alike.setdefault(_EXPERT.sub(".experts.#.", fault), []).append(fault)
    return [
        first if not others else f"{first} (and of {len(others)} more experts)"
        for first, *others in alike.values()
    ]


def _scale_faults(index: TensorIndex, entry: TensorEntry) -> list[str]:
    try:
        find_scale(index, entry)
    except CheckpointError as error:
        return [f"{error.what}: expected {error.expected}, found {error.found}"]
    return []
