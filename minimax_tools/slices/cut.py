"""SliceCut: a slice before it is written, with the tensors of each of its files; no tensor is read yet."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.errors import CheckpointError, UsageError, list_faults
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.description import SliceDescription
from minimax_tools.slices.layout import PTH_FILE, FileFormat
from minimax_tools.slices.stored_weights import StoredWeights
from minimax_tools.stored_dtype import SAFETENSORS_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCut:
    """A slice to be written."""

    source: StoredWeights  # the checkpoint
    description: SliceDescription  # content of its slice.json, without digests
    file_format: FileFormat  # format of its weight files
    # Tensors of each file to be written, by the file's name, in the order in which they lie in the source.
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
        """Assign the tensors that the description names to files.

        Args:
            source: A checkpoint that holds the tensors.
            description: The slice.
            file_format: safetensors, or one `.pth` file.
            shard_size_bytes: Largest size of a shard's data; a larger tensor gets a shard of its own. None: the tensors
                of each shard of the source go into one shard.

        Raises:
            UsageError: A shard size was given for a `.pth` file, which has no shards.
            CheckpointError: No weights are here, or safetensors does not support a dtype.
        """
        if file_format is FileFormat.PTH and shard_size_bytes is not None:
            raise UsageError(
                "a .pth file has no shards", next_step="Leave the size out, or choose --format safetensors."
            )
        index = source.headers
        entries = sorted((index[name] for name in description.tensors), key=lambda entry: entry.position)
        if file_format is FileFormat.PTH:
            shards = {PTH_FILE: tuple(entries)}
        else:
            _refuse_unknown_dtypes(entries)
            groups = _group_by_shard(entries, shard_size_bytes)
            shards = {
                f"model-{number:05}-of-{len(groups):05}.safetensors": group
                # Numbered from 1, as transformers numbers shards that it saves.
                for number, group in enumerate(groups, start=1)
            }
        return cls(source=source, description=description, file_format=file_format, shards=shards)

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Tensors in the order in which they lie in the source."""
        return tuple(entry for shard in self.shards.values() for entry in shard)

    @property
    def size_bytes(self) -> int:
        """Size of the tensors' data."""
        return sum(entry.size_bytes for entry in self.entries)


def cut_slice(
    plan: PartitionPlan,
    node: str,
    source: StoredWeights,
    *,
    file_format: FileFormat = FileFormat.SAFETENSORS,
    shard_size_bytes: int | None = None,
) -> SliceCut:
    """Cut a node's slice out of a checkpoint, along a plan, which may leave out other nodes' tensors.

    Only the files that the slice needs must be here. Format and size of its files are as for `SliceCut.of`.

    Raises:
        UsageError: The plan has no such node, or the node holds nothing.
        CheckpointError: The source lacks a tensor of the slice.
    """
    slice_ = plan.slice_of(node)
    if not slice_.tensors:
        raise UsageError(
            f"node {node} holds nothing in this plan",
            expected="one of " + ", ".join(used.node.name for used in plan.used),
        )
    description = SliceDescription(
        node=node,
        layers=slice_.stage.layers,
        has_embedding=slice_.stage.has_embedding,
        has_head=slice_.stage.has_head,
        source=source.model,
        tensors=dict.fromkeys(sorted(slice_.names)),
    )
    return SliceCut.of(source, description, file_format=file_format, shard_size_bytes=shard_size_bytes)


def _group_by_shard(
    entries: Sequence[TensorEntry], shard_size_bytes: int | None
) -> list[tuple[TensorEntry, ...]]:
    if shard_size_bytes is None:
        # `entries` are in the source's order, so tensors of one file follow each other.
        return [tuple(group) for _, group in groupby(entries, key=lambda entry: entry.file)]
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
    unknown = [f"{entry.name} is {entry.dtype}" for entry in entries if entry.dtype not in SAFETENSORS_NAMES]
    if unknown:
        raise CheckpointError(
            "these tensors cannot be stored as safetensors",
            found=list_faults(unknown),
            next_step="Choose --format pth.",
        )
