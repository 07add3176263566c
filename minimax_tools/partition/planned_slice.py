"""Slice: what one node of a plan holds, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.errors import UsageError, list_faults
from minimax_tools.json_codec import encode
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import PART_EMBEDDING, PartCost
from minimax_tools.partition.node import Node
from minimax_tools.partition.planners import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor and where it lies: bytes `start` to `stop` of `file`, all None before the headers are known.

    `file` is relative to the checkpoint's folder, and inside it.

    Raises:
        UsageError: That is no place in a checkpoint.
    """

    name: str
    file: str | None = None
    start: int | None = None
    stop: int | None = None

    def __post_init__(self) -> None:
        # A plan may come from anywhere, and what follows opens and writes files by these names.
        is_name = isinstance(self.name, str) and self.name != ""
        is_file = self.file is None or (isinstance(self.file, str) and _is_inside(self.file))
        is_run = self.start is None and self.stop is None
        if type(self.start) is int and type(self.stop) is int:
            is_run = self.file is not None and 0 <= self.start <= self.stop
        if not (is_name and is_file and is_run):
            raise UsageError(
                f"{self.name} lies nowhere in a checkpoint",
                found=f"bytes {self.start} to {self.stop} of {self.file!r}",
            )

    @classmethod
    def located(cls, entry: TensorEntry, folder: Path | None) -> PlannedTensor:
        """The tensor of a header; `folder` is the checkpoint's, None where all files lie in it itself."""
        file = entry.file.name if folder is None else entry.file.relative_to(folder).as_posix()
        return cls(name=entry.name, file=file, start=entry.offset, stop=entry.offset + entry.size_bytes)

    @property
    def size_bytes(self) -> int:
        """What it takes in its file; 0 where that is not known."""
        return 0 if self.start is None or self.stop is None else self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one node holds.

    Args:
        stage: The node and its parts of the model.
        cost: What they take.
        tensors: What it reads of the checkpoint, in the order of files and places.

    Raises:
        UsageError: Its ends are neither there nor not, or it costs less than nothing.
    """

    stage: Stage
    cost: PartCost
    tensors: tuple[PlannedTensor, ...]

    def __post_init__(self) -> None:
        ends = (self.stage.has_embedding, self.stage.has_head)
        faults = [f"an end that is {end!r}" for end in ends if not isinstance(end, bool)]
        costs = asdict(self.cost).items()
        faults += [f"{name} of {cost!r}" for name, cost in costs if type(cost) is not int or cost < 0]
        if faults:
            raise UsageError(f"{self.stage.node.name} holds no slice", found=list_faults(faults))

    @property
    def node(self) -> Node:
        """Whose it is."""
        return self.stage.node

    @property
    def seconds_per_token(self) -> float | None:
        """What a token takes here; None where the node's throughput is not known."""
        return None if self.node.tflops is None else self.cost.flops_per_token / (self.node.tflops * 1e12)

    @property
    def names(self) -> tuple[str, ...]:
        """Of its tensors."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that hold some of it, sorted; none where the headers are not known yet."""
        return tuple(sorted({tensor.file for tensor in self.tensors if tensor.file is not None}))

    def to_json(self) -> dict[str, Any]:
        """Return the slice as a plan holds it."""
        node, stage = self.node, self.stage
        files: dict[str | None, list[list[Any]]] = {}
        for tensor in self.tensors:
            files.setdefault(tensor.file, []).append([tensor.name, tensor.start, tensor.stop])
        return {
            "node": node.name,
            "memory_bytes": node.memory_bytes,
            "tflops": node.tflops,
            "chosen_layers": None if node.layers is None else [node.layers.start, node.layers.stop],
            "layers": [stage.layers.start, stage.layers.stop],
            "has_embedding": stage.has_embedding,
            "has_head": stage.has_head,
            "cost": encode(self.cost),
            "files": [{"file": file, "tensors": tensors} for file, tensors in files.items()],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Slice:
        """Return the slice of a plan."""
        chosen = record["chosen_layers"]
        start, stop = record["layers"]
        stage = Stage(
            node=Node(
                name=record["node"],
                memory_bytes=record["memory_bytes"],
                tflops=record["tflops"],
                layers=None if chosen is None else Span(*chosen),
            ),
            layers=range(start, stop),
            has_embedding=record["has_embedding"],
            has_head=record["has_head"],
        )
        tensors = tuple(
            PlannedTensor(name=name, file=file["file"], start=start, stop=stop)
            for file in record["files"]
            for name, start, stop in file["tensors"]
        )
        return cls(stage=stage, cost=PartCost(**record["cost"]), tensors=tensors)


def belongs(part: int | str, stage: Stage) -> bool:
    """Whether a part of the model, as `part_of` tells them, is a stage's."""
    if isinstance(part, int):
        return part in stage.layers
    return stage.has_embedding if part == PART_EMBEDDING else stage.has_head


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in file
