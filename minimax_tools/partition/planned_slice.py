"""Slice: the part of a model that one node holds, and the places of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.errors import UsageError, list_faults, shorten
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import is_plain_name
from minimax_tools.model.span import MAX_LAYERS, Span
from minimax_tools.partition.cost import PartCost
from minimax_tools.partition.node import Node, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor and its place: bytes `start` to `stop` of `file`. A place that is not known yet is None.

    `file` is relative to the checkpoint's folder, and inside it.

    Raises:
        UsageError: The name, the file or the byte range is invalid.
    """

    name: str
    file: str | None = None
    start: int | None = None
    stop: int | None = None

    def __post_init__(self) -> None:
        # A plan file may come from anywhere, and later steps open and write files by these names.
        is_name = isinstance(self.name, str) and self.name != ""
        is_file = self.file is None or (isinstance(self.file, str) and _is_inside(self.file))
        is_range = self.start is None and self.stop is None
        if type(self.start) is int and type(self.stop) is int:
            is_range = self.file is not None and 0 <= self.start <= self.stop
        if not (is_name and is_file and is_range):
            raise UsageError(
                f"{shorten(str(self.name))} has no valid place in a checkpoint",
                found=shorten(f"bytes {self.start} to {self.stop} of {self.file!r}"),
            )

    @classmethod
    def located(cls, entry: TensorEntry, folder: Path | None) -> PlannedTensor:
        """Build the tensor of a header entry; `folder` is the checkpoint's, or None if it has no subfolders."""
        file = entry.file.name if folder is None else entry.file.relative_to(folder).as_posix()
        return cls(name=entry.name, file=file, start=entry.offset, stop=entry.offset + entry.size_bytes)

    @property
    def size_bytes(self) -> int:
        """Number of bytes in the file; 0 if unknown."""
        return 0 if self.start is None or self.stop is None else self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The part of a model that one node holds.

    Raises:
        UsageError: A cost is not a whole number of 0 or more.
    """

    stage: Stage  # the node, and the layers and other parts that it holds
    cost: PartCost
    tensors: tuple[PlannedTensor, ...]  # sorted by file and place

    def __post_init__(self) -> None:
        costs = asdict(self.cost).items()
        faults = [f"{name} of {cost!r}" for name, cost in costs if type(cost) is not int or cost < 0]
        if faults:
            raise UsageError(
                f"the slice of {self.stage.node.name} has no valid cost", found=list_faults(faults)
            )

    @property
    def node(self) -> Node:
        """The node that holds the slice."""
        return self.stage.node

    @property
    def seconds_per_token(self) -> float | None:
        """Time of the slice for one token; None if the node's throughput is unknown."""
        return None if self.node.tflops is None else self.cost.flops_per_token / self.node.flops_per_second

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the slice's tensors."""
        return tuple(tensor.name for tensor in self.tensors)

    @property
    def files(self) -> tuple[str, ...]:
        """Files that hold the slice's tensors, sorted; none before the tensors' places are known."""
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
            "layers": encode(stage.layers),
            "has_embedding": stage.has_embedding,
            "has_head": stage.has_head,
            "cost": encode(self.cost),
            "files": [{"file": file, "tensors": tensors} for file, tensors in files.items()],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Slice:
        """Return the slice of a plan."""
        stored = decode(_StoredSlice, record)
        chosen = stored.chosen_layers
        stage = Stage(
            node=Node(
                name=stored.node,
                memory_bytes=stored.memory_bytes,
                tflops=stored.tflops,
                layers=None if chosen is None else Span(*chosen),
            ),
            layers=range(*stored.layers),
            has_embedding=stored.has_embedding,
            has_head=stored.has_head,
        )
        tensors = tuple(
            PlannedTensor(name=name, file=file.file, start=start, stop=stop)
            for file in stored.files
            for name, start, stop in file.tensors
        )
        return cls(stage=stage, cost=PartCost(**stored.cost), tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredFile:
    """Names and byte ranges of a file's tensors, as a plan holds them."""

    file: str | None
    tensors: tuple[tuple[str, int | None, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredSlice:
    """A slice as a plan holds it.

    Raises:
        ValueError: The layers are no range of layers, or the cost is not whole.
    """

    node: str
    memory_bytes: int
    tflops: float | None
    chosen_layers: tuple[int, int] | None
    layers: tuple[int, int]  # equal ends if the node holds none
    has_embedding: bool
    has_head: bool
    cost: Mapping[str, int]
    files: tuple[_StoredFile, ...]

    def __post_init__(self) -> None:
        start, stop = self.layers
        if not 0 <= start <= stop <= MAX_LAYERS:
            raise ValueError(f"layers are {shorten(str([start, stop]))}")
        wrong = self.cost.keys() ^ {entry.name for entry in fields(PartCost)}
        if wrong:
            raise ValueError(f"cost lacks or should not have {shorten(', '.join(sorted(wrong)))}")


def _is_inside(file: str) -> bool:
    """Decide whether a relative path stays inside the folder that it is relative to."""
    path = PurePosixPath(file)
    is_relative = bool(path.parts) and not path.is_absolute() and "\\" not in file
    return is_relative and all(map(is_plain_name, path.parts))
