"""Checks of a plan's slices; each returns the faults it finds, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.model.architecture import Architecture
from minimax_tools.model.param_mapper import ParamMapper, part_of
from minimax_tools.model.weight_names import SCALE_SUFFIX
from minimax_tools.partition.planned_slice import PlannedTensor, Slice


def find_stage_faults(slices: Sequence[Slice], num_hidden_layers: int) -> list[str]:
    """Return faults in the layers, the places of embedding and head, and the nodes' memory."""
    used = [slice_ for slice_ in slices if slice_.stage.is_used]
    names = [slice_.node.name for slice_ in slices]
    repeated = sorted({name for name in names if names.count(name) > 1})
    faults = [f"node {name} is there twice" for name in repeated]
    for slice_ in slices:
        layers, cost = slice_.stage.layers, slice_.cost
        if not 0 <= layers.start <= layers.stop:
            faults.append(f"node {slice_.node.name} has layers {layers.start} to {layers.stop}")
        if cost.memory_bytes > slice_.node.memory_bytes:
            faults.append(
                f"node {slice_.node.name} needs {cost.memory_bytes} bytes of memory, but has "
                f"{slice_.node.memory_bytes}"
            )
    next_layer = 0
    for slice_ in used:
        layers = slice_.stage.layers
        if layers.start != next_layer:
            faults.append(
                f"node {slice_.node.name} begins with layer {layers.start}, expected layer {next_layer}"
            )
        # A faulty plan may have a stop before its start.
        next_layer = max(layers.stop, layers.start)
    if next_layer != num_hidden_layers:
        faults.append(f"the slices end with layer {next_layer - 1}, the model with {num_hidden_layers - 1}")
    return faults + _end_faults(slices, used)


def _end_faults(slices: Sequence[Slice], used: Sequence[Slice]) -> list[str]:
    """Return faults of the embedding, which only the first used slice may hold, and of the head, only the last."""
    faults = []
    first, last = (used[0], used[-1]) if used else (None, None)
    for part, position, right_holder, holders in (
        ("embedding", "first", first, [slice_ for slice_ in slices if slice_.stage.has_embedding]),
        ("head", "last", last, [slice_ for slice_ in slices if slice_.stage.has_head]),
    ):
        if len(holders) != 1:
            faults.append(f"{len(holders)} nodes hold the {part}")
        for slice_ in holders:
            if slice_ is not right_holder:
                faults.append(f"node {slice_.node.name} holds the {part}, but is not the {position}")
    return faults


def find_holding_faults(
    slices: Sequence[Slice], shared: Collection[str], architecture: Architecture
) -> list[str]:
    """Return faults of tensors on the wrong node or on several, and of scales apart from their weights.

    `shared` names the tensors that may lie on several nodes.
    """
    faults = []
    holders: dict[str, list[str]] = {}
    for slice_ in slices:
        node, held = slice_.node.name, set(slice_.names)
        for name in slice_.names:
            holders.setdefault(name, []).append(node)
            if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) + ".weight" not in held:
                faults.append(f"node {node} holds {name} without its weight")
            is_tied = name in shared and slice_.stage.has_head
            if not is_tied and not slice_.stage.holds(part_of(name, architecture)):
                faults.append(f"node {node} holds {name}, which belongs to another node")
    for name, nodes in holders.items():
        if len(nodes) > 1 and (name not in shared or len(set(nodes)) < len(nodes)):
            faults.append(f"{name} is held by {' and '.join(nodes)}")
    for name in shared:
        nodes = holders.get(name, [])
        if len(set(nodes)) < 2:
            faults.append(f"{name} is shared, but {f'only {nodes[0]}' if nodes else 'no node'} holds it")
        if not ParamMapper.is_token_embedding(name, architecture):
            faults.append(f"{name} is shared, but only an embedding tied to the lm_head may be")
    return faults


def find_entry_faults(
    slices: Sequence[Slice],
    entries: Mapping[str, TensorEntry],
    architecture: Architecture,
    folder: Path | None,
    *,
    names: Set[str],
) -> list[str]:
    """Return faults of tensors that no node holds, that the checkpoint lacks, or that lie elsewhere.

    Args:
        slices: The plan's slices.
        entries: Tensors of the checkpoint whose headers are known, by name. Other tensors' places are not checked.
        architecture: Naming of the tensors.
        folder: The checkpoint's folder; None if all shards lie at its top.
        names: Names of all tensors of the checkpoint.
    """
    held = {tensor.name for slice_ in slices for tensor in slice_.tensors}
    faults = [f"no node holds {name}" for name in sorted(names - held)]
    for slice_ in slices:
        for tensor in slice_.tensors:
            if tensor.name not in names:
                faults.append(f"node {slice_.node.name} holds {tensor.name}, which the checkpoint lacks")
            elif tensor.name in entries and not _lies_at(
                tensor, PlannedTensor.located(entries[tensor.name], folder)
            ):
                byte_range = "" if tensor.start is None else f"bytes {tensor.start} to {tensor.stop} of "
                faults.append(f"{tensor.name} does not lie at {byte_range}{tensor.file}")
    return faults + _tied_head_faults(slices, architecture, names)


def _lies_at(tensor: PlannedTensor, place: PlannedTensor) -> bool:
    """Decide whether as much of a tensor's place as the plan knows is right."""
    if tensor.file is None:
        return True
    return tensor.file == place.file and (tensor.start is None or tensor == place)


def _tied_head_faults(slices: Sequence[Slice], architecture: Architecture, names: Set[str]) -> list[str]:
    """Return slices with a head that lack the token embedding, if the checkpoint has no lm_head of its own."""
    if any(ParamMapper.is_lm_head(name, architecture) for name in names):
        return []
    tied = [name for name in sorted(names) if ParamMapper.is_token_embedding(name, architecture)]
    return [
        f"node {slice_.node.name} has the head, but lacks {name}, which the lm_head is tied to"
        for slice_ in slices
        for name in tied
        if slice_.stage.has_head and name not in slice_.names
    ]
