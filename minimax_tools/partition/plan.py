"""PartitionPlan: which node holds which tensors of a checkpoint, as a value and as one JSON file.

The file drives whatever follows: what is downloaded, cut out, proved and run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.errors import CannotRunError, CheckpointError, UsageError, list_faults
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.whole_file import whole_file
from minimax_tools.model.architecture import Architecture, ParamMapper
from minimax_tools.partition.cost import (
    PART_EMBEDDING,
    ModelCost,
    TensorSize,
    Workload,
    measure_costs,
    part_of,
)
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan_faults import find_entry_faults, find_holding_faults, find_stage_faults
from minimax_tools.partition.planned_slice import PlannedTensor, Slice, belongs
from minimax_tools.partition.planners import Stage, plan_stages, stage_cost

# A plan is read together with its slices.
__all__ = ["PartitionPlan", "PlannedTensor", "Slice", "assign_tensors", "make_plan"]

SCHEMA_VERSION = 1

# A tensor's name and bytes, or two bounds, as `json` breaks them into lines.
_NUMBER = r"\n\s*(\d+|null)"
_PAIRS = re.compile(rf"\[{_NUMBER},{_NUMBER}\n\s*\]")
_TENSORS = re.compile(rf'\[\n\s*("[^"\n]*"),{_NUMBER},{_NUMBER}\n\s*\]')


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """Who holds what.

    Args:
        model: The checkpoint: a folder as it was given, or `owner/name@commit` of a hub's model.
        model_type: As config.json calls it.
        planner: Which one divided the layers.
        workload: What for.
        num_hidden_layers: Of the whole model.
        slices: In the order in which a token passes them; idle nodes last.
        shared: Tensors that several slices hold on purpose, and why; by name.

    Raises:
        UsageError: That is no plan of any model.
    """

    model: str
    model_type: str
    planner: str
    workload: Workload
    num_hidden_layers: int
    slices: tuple[Slice, ...]
    shared: Mapping[str, str]

    def __post_init__(self) -> None:
        # A plan may come from anywhere.
        texts = (self.model, self.model_type, self.planner, *self.shared, *self.shared.values())
        counts = {
            "num_hidden_layers": self.num_hidden_layers,
            "context_length": self.workload.context_length,
            "batch_size": self.workload.batch_size,
        }
        faults = [f"{text!r} where a text was due" for text in texts if not isinstance(text, str)]
        faults += [
            f"{name} is {found!r}" for name, found in counts.items() if type(found) is not int or found < 1
        ]
        faults += [] if self.slices else ["no slice"]
        if faults:
            raise UsageError("this is no plan of a model", found=list_faults(faults))

    def slice_of(self, node: str) -> Slice:
        """The slice of the node of that name.

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
        """The slices that hold something."""
        return tuple(slice_ for slice_ in self.slices if slice_.stage.is_used)

    def share(self, slice_: Slice) -> float:
        """How much of the model's layers a slice has, 0 to 1."""
        return len(slice_.stage.layers) / self.num_hidden_layers

    def memory_weight(self, slice_: Slice) -> tuple[float, float]:
        """Where the memory of a slice's node begins and ends among all nodes' memory, 0 to 1."""
        memory = [other.node.memory_bytes for other in self.slices]
        rank = self.slices.index(slice_)
        return sum(memory[:rank]) / sum(memory), sum(memory[: rank + 1]) / sum(memory)

    @property
    def digest(self) -> str:
        """sha256 of who holds what; where the checkpoint lies is each machine's own business."""
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
        """All that is wrong with the plan, each fault in words; nothing where it is whole.

        Layers must meet from the first to the last, embedding and head stand at the ends, every node have the memory;
        every tensor must lie in exactly one slice, or where it is `shared` in the first and the last; scales must lie
        with their weights; a slice holds only what belongs to its parts; files and byte ranges must be those of the
        headers.

        Args:
            entries: The checkpoint's tensors by name; None where only what the plan says of itself is to be checked.
            architecture: How they are named.
            folder: Of the checkpoint, where `entries` is given.
            names: Of all tensors, where `entries` holds only some of them.
        """
        faults = find_stage_faults(self.slices, self.num_hidden_layers)
        faults += find_holding_faults(self.slices, self.shared, architecture)
        if entries is not None:
            names = entries.keys() if names is None else names
            faults += find_entry_faults(self.slices, entries, architecture, folder, names=names)
        return faults

    def validate(
        self,
        entries: Mapping[str, TensorEntry] | None,
        architecture: Architecture,
        *,
        folder: Path | None = None,
    ) -> None:
        """Pass, or raise with everything that `find_faults` finds.

        Raises:
            CheckpointError: The plan is not whole, or not this checkpoint's.
        """
        faults = self.find_faults(entries, architecture, folder=folder)
        if faults:
            raise CheckpointError(
                f"the plan for {self.model} has {len(faults)} fault{'s' if len(faults) > 1 else ''}",
                found=list_faults(faults),
                next_step="Make it anew: mm2-split plan.",
            )

    def write(self, path: Path) -> None:
        """Write the plan as JSON, a line for each tensor.

        Raises:
            CannotRunError: The file cannot be written.
        """
        text = _PAIRS.sub(r"[\1, \2]", json.dumps(encode(self), indent=1))
        text = _TENSORS.sub(r"[\1, \2, \3]", text)
        try:
            with whole_file(path) as file:
                file.write(text + "\n")
        except OSError as error:
            raise CannotRunError(
                f"cannot write the plan {path}",
                found=error.strerror or str(error),
                next_step="Choose another place for it.",
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the plan as its file holds it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "model_type": self.model_type,
            "planner": self.planner,
            "context_length": self.workload.context_length,
            "batch_size": self.workload.batch_size,
            "dtype": encode(self.workload.dtype),
            "num_hidden_layers": self.num_hidden_layers,
            "shared": encode(self.shared),
            "slices": encode(self.slices),
        }

    @classmethod
    def read(cls, path: Path, *, tensors_of: str | None = None) -> PartitionPlan:
        """Read a plan that `write` wrote.

        Args:
            path: The file.
            tensors_of: A node: only its slice's tensors are kept, which for a model of 100 000 takes a tenth of the
                memory; such a plan can be neither checked nor written. None for all nodes.

        Raises:
            UsageError: The file is no plan, or one of another version; or it has no such node.
        """

        def drop_others(values: dict[str, Any]) -> dict[str, Any]:
            # Called for every object as soon as it is parsed: the tensors of others are gone before the next slice.
            if "files" in values and values.get("node") != tensors_of:
                values["files"] = []
            return values

        try:
            text = path.read_text(encoding="utf-8")
            values = json.loads(text, object_hook=None if tensors_of is None else drop_others)
            version = values["schema_version"]
            plan = decode(cls, values) if version == SCHEMA_VERSION else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            raise UsageError(
                f"{path} is no plan",
                found=f"{type(error).__name__}: {error}",
                next_step="Make one: mm2-split plan --output PLAN.json.",
            ) from error
        if plan is None:
            raise UsageError(
                f"{path} is a plan of another version",
                expected=str(SCHEMA_VERSION),
                found=str(version),
                next_step="Make it anew: mm2-split plan --output PLAN.json.",
            )
        if tensors_of is not None:
            plan.slice_of(tensors_of)
        return plan

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PartitionPlan:
        """Return the plan of a file."""
        return cls(
            model=values["model"],
            model_type=values["model_type"],
            planner=values["planner"],
            workload=Workload(
                context_length=values["context_length"],
                batch_size=values["batch_size"],
                dtype=decode(torch.dtype, values["dtype"]),
            ),
            num_hidden_layers=values["num_hidden_layers"],
            slices=decode(tuple[Slice, ...], values["slices"]),
            shared=dict(values["shared"]),
        )


def make_plan(
    *,
    model: str,
    config: Mapping[str, Any],
    architecture: Architecture,
    tensors: Sequence[TensorEntry] | Sequence[TensorSize],
    folder: Path | None,
    planner: str,
    nodes: Sequence[Node],
    workload: Workload,
) -> PartitionPlan:
    """Divide a model among nodes.

    Args:
        model: The checkpoint, as the plan names it.
        config: The keys of its config.json.
        architecture: How its tensors are named.
        tensors: All of them, from the headers; or as config.json tells them, with places unknown.
        folder: The checkpoint's folder, where the tensors come from headers.
        planner: One of `PLANNERS`.
        nodes: 1 to 64.
        workload: What the model is to run.

    Raises:
        UsageError: The planner is unknown, or the nodes do not say what it needs.
        CannotRunError: The nodes cannot hold the model.
        CheckpointError: The checkpoint is not whole.
    """
    return assign_tensors(
        model=model,
        architecture=architecture,
        tensors=tensors,
        folder=folder,
        planner=planner,
        cost=measure_costs(tensors, architecture, config, workload),
        nodes=nodes,
    )


def assign_tensors(
    *,
    model: str,
    architecture: Architecture,
    tensors: Sequence[TensorEntry] | Sequence[TensorSize],
    folder: Path | None,
    planner: str,
    cost: ModelCost,
    nodes: Sequence[Node],
) -> PartitionPlan:
    """As `make_plan`, of a model whose costs are known already.

    Raises:
        UsageError: As there.
        CannotRunError: As there.
    """
    stages = plan_stages(planner, cost, nodes)
    located = {
        tensor.name: PlannedTensor.located(tensor, folder)
        if isinstance(tensor, TensorEntry)
        else PlannedTensor(name=tensor.name)
        for tensor in tensors
    }
    shared = _shared(located, stages, cost, architecture)
    parts: dict[int | str, list[PlannedTensor]] = {}
    for tensor in located.values():
        parts.setdefault(part_of(tensor.name, architecture), []).append(tensor)
    return PartitionPlan(
        model=model,
        model_type=architecture.model_type,
        planner=planner,
        workload=cost.workload,
        num_hidden_layers=len(cost.layers),
        slices=tuple(
            Slice(
                stage=stage,
                cost=stage_cost(cost, stage),
                tensors=_tensors_of(stage, parts, shared),
            )
            for stage in stages
        ),
        shared=shared,
    )


def _shared(
    names: Iterable[str], stages: Sequence[Stage], cost: ModelCost, architecture: Architecture
) -> dict[str, str]:
    if not cost.is_tied or any(stage.has_embedding and stage.has_head for stage in stages):
        return {}
    return {
        name: "the lm_head is tied to the embedding"
        for name in names
        if ParamMapper.is_token_embedding(name, architecture)
    }


def _tensors_of(
    stage: Stage, parts: Mapping[int | str, Sequence[PlannedTensor]], shared: Mapping[str, str]
) -> tuple[PlannedTensor, ...]:
    own = [tensor for part, tensors in parts.items() if belongs(part, stage) for tensor in tensors]
    if stage.has_head:
        own += [tensor for tensor in parts.get(PART_EMBEDDING, ()) if tensor.name in shared]
    return tuple(sorted(own, key=lambda tensor: (tensor.file or "", tensor.start or 0, tensor.name)))
