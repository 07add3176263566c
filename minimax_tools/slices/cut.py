"""SliceCut: which tensors go from a checkpoint into which files of a slice; nothing is read or written yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

from minimax_tools.checkpoint.header import DTYPE_NAMES, TensorEntry
from minimax_tools.errors import CheckpointError, UsageError, list_faults
from minimax_tools.slices.description import SliceDescription
from minimax_tools.slices.stored_weights import StoredWeights

PTH_FILE = "model.pth"


class FileFormat(Enum):
    """How a slice's tensors are stored."""

    SAFETENSORS = "safetensors"
    PTH = "pth"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCut:
    """A slice to be written.

    Args:
        source: The checkpoint.
        description: What the slice's folder will say of itself, digests aside.
        file_format: How it will be stored.
        shards: By file name the tensors, in the order in which they lie in their source.
    """

    source: StoredWeights
    description: SliceDescription
    file_format: FileFormat
    shards: dict[str, tuple[TensorEntry, ...]] = field(repr=False)

    @classmethod
    def of(
        cls,
        source: StoredWeights,
        description: SliceDescription,
        *,
        file_format: FileFormat = FileFormat.SAFETENSORS,
        shard_size_bytes: int | None = None,
    ) -> SliceCut:
        """Cut out the tensors that the description names.

        Args:
            source: A checkpoint that holds them.
            description: The slice.
            file_format: safetensors, or one `.pth` file.
            shard_size_bytes: Most data of a shard, except that no tensor is split; None: one shard for each of the
                source's that holds some of the slice.

        Raises:
            UsageError: A size was given for shards of a `.pth` file, which is one.
            CheckpointError: No weights are here, or safetensors has no name for a dtype.
        """
        if file_format is FileFormat.PTH and shard_size_bytes is not None:
            raise UsageError(
                "a .pth file has no shards", next_step="Leave the size out, or ask for --format safetensors."
            )
        index = source.headers
        entries = sorted((index[name] for name in description.tensors), key=lambda entry: entry.position)
        if file_format is FileFormat.PTH:
            shards = {PTH_FILE: tuple(entries)}
        else:
            _refuse_unknown_dtypes(entries)
            parts = _as_in_source(entries) if shard_size_bytes is None else _pack(entries, shard_size_bytes)
            shards = {
                f"model-{number:05}-of-{len(parts):05}.safetensors": part
                for number, part in enumerate(parts, start=1)
            }
        return cls(source=source, description=description, file_format=file_format, shards=shards)

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors as they lie in the source."""
        return tuple(entry for shard in self.shards.values() for entry in shard)

    @property
    def size_bytes(self) -> int:
        """Size of their data."""
        return sum(entry.size_bytes for entry in self.entries)


def _as_in_source(entries: Sequence[TensorEntry]) -> list[tuple[TensorEntry, ...]]:
    return [tuple(group) for _, group in groupby(entries, key=lambda entry: entry.file)]


def _pack(entries: Sequence[TensorEntry], shard_size_bytes: int) -> list[tuple[TensorEntry, ...]]:
    shards: list[list[TensorEntry]] = []
    filled_bytes = 0
    for entry in entries:
        if not shards or filled_bytes + entry.size_bytes > shard_size_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(entry)
        filled_bytes += entry.size_bytes
    return [tuple(shard) for shard in shards]


def _refuse_unknown_dtypes(entries: Collection[TensorEntry]) -> None:
    unknown = [f"{entry.name} is {entry.dtype}" for entry in entries if entry.dtype not in DTYPE_NAMES]
    if unknown:
        raise CheckpointError(
            "these tensors cannot be stored as safetensors",
            found=list_faults(unknown),
            next_step="Ask for --format pth.",
        )
