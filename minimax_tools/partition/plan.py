"""PartitionPlan: the division of a checkpoint's tensors among nodes, as a value and as a JSON file, and its checks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.errors import (
    CannotRunError,
    CheckpointError,
    UsageError,
    format_count,
    list_faults,
    shorten,
)
from minimax_tools.json_codec import decode_fields, decode_version, encode, encode_fields
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.json_file import read_own_json
from minimax_tools.model.architecture import PART_EMBEDDING, PART_HEAD, Architecture, ParamMapper, part_of
from minimax_tools.partition.cost import ModelCost, Workload
from minimax_tools.partition.node import Node, Stage, stage_cost
from minimax_tools.partition.planned_slice import PlannedTensor, Slice
from minimax_tools.partition.planners import plan_stages


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
    for part, holders, right in (
        ("embedding", [slice_ for slice_ in slices if slice_.stage.has_embedding], used[:1]),
        ("head", [slice_ for slice_ in slices if slice_.stage.has_head], used[-1:]),
    ):
        found, expected = (", ".join(slice_.node.name for slice_ in group) for group in (holders, right))
        if found != expected:
            faults.append(f"the {part} is on {found or 'no node'}, expected {expected or 'a used node'}")
    return faults


def find_tensor_faults(
    slices: Sequence[Slice], shared: Collection[str], architecture: Architecture, names: Set[str]
) -> list[str]:
    """Return faults of tensors that a slice lacks, or holds though they belong elsewhere.

    `names` are those of all tensors of the checkpoint; `shared` the tensors that may lie on several nodes.
    """
    by_part: dict[int | str, set[str]] = {}
    for name in names:
        by_part.setdefault(part_of(name, architecture), set()).add(name)
    embeddings = by_part.get(PART_EMBEDDING, set())
    # Without an lm_head of its own, the head is the token embedding once more.
    tied = {name for name in embeddings if ParamMapper.is_token_embedding(name, architecture)}
    tied -= tied if PART_HEAD in by_part else set()
    faults = []
    for slice_ in slices:
        node, stage, held = slice_.node.name, slice_.stage, Counter(slice_.names)
        own = set(tied) if stage.has_head else set()
        own.update(*(part_names for part, part_names in by_part.items() if stage.holds(part)))
        faults += [f"node {node} lacks {name}" for name in sorted(own - held.keys())]
        for name in sorted(held.keys() - own):
            why = "belongs to another node" if name in names else "the checkpoint lacks"
            faults.append(f"node {node} holds {name}, which {why}")
        faults += [f"node {node} holds {name} {count} times" for name, count in held.items() if count > 1]
    is_on_one_node = any(slice_.stage.has_embedding and slice_.stage.has_head for slice_ in slices)
    expected = set() if is_on_one_node else tied
    if set(shared) != expected:
        found = ", ".join(sorted(shared)) or "nothing"
        faults.append(f"the plan shares {found}, expected {', '.join(sorted(expected)) or 'nothing'}")
    return faults


def find_place_faults(
    slices: Sequence[Slice], entries: Mapping[str, TensorEntry], folder: Path | None
) -> list[str]:
    """Return faults of tensors that lie elsewhere than the plan says, as far as it says so."""
    faults = []
    for slice_ in slices:
        for tensor in slice_.tensors:
            if tensor.file is None or tensor.name not in entries:
                continue
            place = PlannedTensor.located(entries[tensor.name], folder)
            if (
                tensor.file != place.file
                or tensor.start not in (None, place.start)
                or tensor.stop not in (None, place.stop)
            ):
                byte_range = "" if tensor.start is None else f"bytes {tensor.start} to {tensor.stop} of "
                faults.append(f"{tensor.name} does not lie at {byte_range}{tensor.file}")
    return faults


# Users of a plan import its slices from here too.
__all__ = ["PartitionPlan", "PlannedTensor", "Slice", "make_plan"]

SCHEMA_VERSION = 1

# More tokens or layers than any model has: a damaged plan may give any number.
_MAX_COUNT = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """The division of a checkpoint's tensors among nodes.

    Raises:
        UsageError: There is no slice, or a count is below 1.
    """

    model: str  # the checkpoint: a folder as it was given, or `owner/name@commit` of a model on a hub
    model_type: str  # the checkpoint's `model_type` in config.json
    planner: str  # name of the planner that divided the layers
    workload: Workload  # inputs that the costs are for
    num_hidden_layers: int  # number of layers of the whole model
    shared: Mapping[str, str]  # tensors that several slices hold on purpose; by name, the reason
    slices: tuple[Slice, ...]  # the slices in the order in which a token passes them; idle nodes last

    def __post_init__(self) -> None:
        # A plan file may come from anywhere, so its numbers are checked.
        counts = {
            "number of slices": len(self.slices),
            "num_hidden_layers": self.num_hidden_layers,
            "context_length": self.workload.context_length,
            "batch_size": self.workload.batch_size,
        }
        faults = [
            f"{name} is {shorten(str(count))}"
            for name, count in counts.items()
            if not 1 <= count <= _MAX_COUNT
        ]
        if faults:
            raise UsageError("the plan is invalid", expected=f"1 to {_MAX_COUNT}", found=list_faults(faults))

    def slice_of(self, node: str) -> Slice:
        """Return the slice of the node of that name.

        Raises:
            UsageError: The plan has no such node.
        """
        for slice_ in self.slices:
            if slice_.node.name == node:
                return slice_
        names = ", ".join(slice_.node.name for slice_ in self.slices)
        raise UsageError(f"the plan has no node {node!r}", expected=f"one of {names}")

    @property
    def used(self) -> tuple[Slice, ...]:
        """Slices that hold something."""
        return tuple(slice_ for slice_ in self.slices if slice_.stage.is_used)

    def share(self, slice_: Slice) -> float:
        """Return the fraction of the model's layers that a slice has, 0 to 1."""
        return len(slice_.stage.layers) / self.num_hidden_layers

    def memory_weight(self, slice_: Slice) -> tuple[float, float]:
        """Return start and end of a node's share of all memory, with the nodes laid end to end from 0 to 1."""
        memory = [other.node.memory_bytes for other in self.slices]
        rank = self.slices.index(slice_)
        return sum(memory[:rank]) / sum(memory), sum(memory[: rank + 1]) / sum(memory)

    @property
    def digest(self) -> str:
        """sha256 of the plan without the checkpoint's location, which may differ on each machine."""
        values = {name: value for name, value in encode(self).items() if name != "model"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def find_faults(
        self,
        entries: Mapping[str, TensorEntry] | None,
        architecture: Architecture,
        *,
        folder: Path | None = None,
        names: Set[str] | None = None,
    ) -> list[str]:
        """Return all faults of the plan in words: of layers, ends, memory, tensors, and their places in the headers.

        Args:
            entries: The checkpoint's tensors by name; None to check the plan without a checkpoint.
            architecture: Naming of the tensors.
            folder: The checkpoint's folder, if `entries` is given; None if all shards lie at its top.
            names: Names of all tensors of the checkpoint, if `entries` holds only some; None if it holds all.
        """
        if names is None:
            planned = {name for slice_ in self.slices for name in slice_.names}
            names = planned if entries is None else entries.keys()
        faults = find_stage_faults(self.slices, self.num_hidden_layers)
        faults += find_tensor_faults(self.slices, self.shared, architecture, names)
        return faults + find_place_faults(self.slices, entries or {}, folder)

    def validate(
        self,
        entries: Mapping[str, TensorEntry] | None,
        architecture: Architecture,
        *,
        folder: Path | None = None,
    ) -> None:
        """Check the plan by `find_faults`, and raise one error with all faults.

        Raises:
            CheckpointError: The plan has faults, or is not this checkpoint's.
        """
        faults = self.find_faults(entries, architecture, folder=folder)
        if faults:
            raise CheckpointError(
                f"the plan for {self.model} has {format_count(len(faults), 'fault')}",
                found=list_faults(faults),
                next_step="Make a new plan: mm2-split plan.",
            )

    def write(self, path: Path) -> None:
        """Write the plan as JSON, with one line for each tensor.

        Raises:
            CannotRunError: The file cannot be written.
        """
        text = _lay_out(encode(self))
        try:
            with whole_file(path) as file:
                file.write(text + "\n")
        except OSError as error:
            raise CannotRunError(
                f"cannot write the plan {path}",
                found=error.strerror or str(error),
                next_step="Choose another path for it.",
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the plan as its file holds it."""
        record = encode_fields(self)
        named = {name: record.pop(name) for name in ("model", "model_type", "planner")}
        return {"schema_version": SCHEMA_VERSION, **named, **record.pop("workload"), **record}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PartitionPlan:
        """Return the plan of a file's content."""
        workload = {name: record[name] for name in ("context_length", "batch_size", "dtype")}
        return decode_fields(cls, {**record, "workload": workload})

    @classmethod
    def read(cls, path: Path, *, tensors_of: str | None = None) -> PartitionPlan:
        """Read a plan that `write` wrote.

        Args:
            path: The file.
            tensors_of: A node whose tensors alone are kept; None for all nodes. For a model of 100 000 tensors this
                takes a tenth of the memory, but such a plan can be neither checked nor written.

        Raises:
            UsageError: The file is not a plan of this version, or it has no such node.
        """

        def drop_others(values: dict[str, Any]) -> dict[str, Any]:
            # Called for each object once it is parsed: other nodes' tensors are freed before the next slice is read.
            if "files" in values and values.get("node") != tensors_of:
                values["files"] = []
            return values

        try:
            values = read_own_json(path, object_hook=None if tensors_of is None else drop_others)
            plan = decode_version(cls, values, version=SCHEMA_VERSION)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            raise UsageError(
                f"{path} is no plan",
                found=shorten(f"{type(error).__name__}: {error}"),
                next_step="Make one: mm2-split plan --output PLAN.json.",
            ) from error
        if tensors_of is not None:
            plan.slice_of(tensors_of)
        return plan


def make_plan(
    *,
    model: str,
    architecture: Architecture,
    tensors: Sequence[TensorSize],
    folder: Path | None,
    planner: str,
    cost: ModelCost,
    nodes: Sequence[Node],
) -> PartitionPlan:
    """Divide a model among 1 to 64 nodes by a planner of `PLANNERS`.

    `model` is the checkpoint's name in the plan. `tensors` come from its headers; or, if only config.json is known,
    from `expected_tensors`, and their places are unknown. `folder` is the checkpoint's, if they come from headers.

    Raises:
        UsageError: The planner is unknown, or a node lacks a figure that the planner needs.
        CannotRunError: The nodes cannot hold the model.
    """
    stages = plan_stages(planner, cost, nodes)
    parts: dict[int | str, list[PlannedTensor]] = {}
    for tensor in tensors:
        planned = (
            PlannedTensor.located(tensor, folder)
            if isinstance(tensor, TensorEntry)
            else PlannedTensor(name=tensor.name)
        )
        parts.setdefault(part_of(tensor.name, architecture), []).append(planned)
    shared = {}
    if cost.is_tied and not any(stage.has_embedding and stage.has_head for stage in stages):
        shared = {
            tensor.name: "the lm_head is tied to the embedding"
            for tensor in parts[PART_EMBEDDING]
            if ParamMapper.is_token_embedding(tensor.name, architecture)
        }
    return PartitionPlan(
        model=model,
        model_type=architecture.model_type,
        planner=planner,
        workload=cost.workload,
        num_hidden_layers=len(cost.layers),
        shared=shared,
        slices=tuple(
            Slice(stage=stage, cost=stage_cost(cost, stage), tensors=_tensors_of(stage, parts, shared))
            for stage in stages
        ),
    )


def _lay_out(value: Any, indent: str = "") -> str:
    """Return JSON in which a plain value, or a list of such, takes one line."""
    if isinstance(value, dict):
        ends = "{}"
        items = [f"{json.dumps(key)}: {_lay_out(item, indent + ' ')}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        ends = "[]"
        items = [_lay_out(item, indent + " ") for item in value]
    else:
        return json.dumps(value)
    lines = f",\n{indent} ".join(items)
    return f"{ends[0]}\n{indent} {lines}\n{indent}{ends[1]}" if items else ends


def _tensors_of(
    stage: Stage, parts: Mapping[int | str, Sequence[PlannedTensor]], shared: Mapping[str, str]
) -> tuple[PlannedTensor, ...]:
    held = [tensor for part, tensors in parts.items() if stage.holds(part) for tensor in tensors]
    if stage.has_head:
        held += [tensor for tensor in parts[PART_EMBEDDING] if tensor.name in shared]
    return tuple(sorted(held, key=lambda tensor: (tensor.file or "", tensor.start or 0, tensor.name)))
