"""A slice's folder: its tensors byte for byte, their index, the files that describe the model, and slice.json.

The folder is written under a temporary name and renamed, so a folder with the final name is complete.

Sources are safetensors or torch files (`.bin`), slices are safetensors or one torch file (`.pth`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from minimax_tools.checkpoint.header import (
    ByteRange,
    TensorEntry,
    divide_into_shards,
    encode_header,
    join_ranges,
)
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.weight_files import INDEX_FILE
from minimax_tools.errors import CheckpointError, UsageError, list_faults
from minimax_tools.hub.checkpoint_folder import DESCRIBING_SUFFIXES
from minimax_tools.machine.files import new_folder, remove_abandoned, sync_path
from minimax_tools.machine.progress import NoProgress, Progress
from minimax_tools.model.spec import CONFIG_FILE
from minimax_tools.model.stored_names import StoredNames
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.description import (
    PTH_FILE,
    SLICE_FILE,
    FileFormat,
    SliceDescription,
    describe_shape,
    digest_tensors,
    read_pieces,
)
from minimax_tools.slices.stored_weights import StoredWeights
from minimax_tools.stored_dtype import SAFETENSORS_NAMES

# Bytes copied by one call: small enough to react to an interrupt, large enough to cost no time.
_PIECE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20

# The source's index files are not copied: a slice has its own index.
_INDEX_SUFFIX = ".index.json"
_REMEDY = "Choose an --output with more room, or make room."


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
            if shard_size_bytes is None:
                # In the source's order, so tensors of one file follow each other.
                groups = [tuple(group) for _, group in groupby(entries, key=lambda entry: entry.file)]
            else:
                groups = divide_into_shards(entries, shard_size_bytes)
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


def _refuse_unknown_dtypes(entries: Collection[TensorEntry]) -> None:
    unknown = [f"{entry.name} is {entry.dtype}" for entry in entries if entry.dtype not in SAFETENSORS_NAMES]
    if unknown:
        raise CheckpointError(
            "these tensors cannot be stored as safetensors",
            found=list_faults(unknown),
            next_step="Choose --format pth.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFolder:
    """A slice on the disk."""

    folder: Path  # folder of the slice
    description: SliceDescription  # content of its slice.json
    files: tuple[Path, ...]  # paths of its weight files
    size_bytes: int  # size of its tensors' data
    file_sizes: Mapping[str, int] = field(repr=False)  # size in bytes of every file in the folder, by name
    is_new: bool  # True if it was written now, False if it was there already

    def require_files(self) -> None:
        """Check that all files are there still, of the sizes that they had when the slice was written or found.

        Raises:
            CheckpointError: Something removed or cut one since.
        """
        step = "remove the folder and run the same command again"
        _require_files(self.folder, self.file_sizes, named=self.folder, step=step)


def write_slice(
    cut: SliceCut, output: Path, *, with_digests: bool = False, progress: Progress | None = None
) -> SliceFolder:
    """Write a slice, or find the same slice there already, equal byte for byte.

    Args:
        cut: The slice.
        output: A folder that does not exist yet, is empty, or holds the same slice.
        with_digests: Write each tensor's sha256 into slice.json; this reads all tensors once more.
        progress: Reports each file.

    Raises:
        UsageError: `output` holds something else.
        CheckpointError: There is no room, a tensor cannot be read, or the folder cannot be written.
    """
    if output.is_dir() and any(output.iterdir()):
        # A killed run may have left something after it wrote the slice.
        remove_abandoned(output.parent, name=output.name)
        return _reuse_slice(cut, output, with_digests=with_digests)
    return _write_new_slice(cut, output, with_digests=with_digests, progress=progress or NoProgress())


def read_slice_folder(folder: Path) -> TensorIndex:
    """Read the headers of a slice's tensors, in either format.

    Raises:
        CheckpointError: Its files are missing or damaged, or contradict its index.
    """
    pth = folder / PTH_FILE
    if pth.is_file():
        return TensorIndex.from_file(pth)
    # A slice keeps the names that its checkpoint stores.
    return TensorIndex.from_folder(folder, stored_names=StoredNames())


def _write_new_slice(cut: SliceCut, output: Path, *, with_digests: bool, progress: Progress) -> SliceFolder:
    describing = tuple(_describing_files(cut.source.folder))
    size_bytes = cut.size_bytes + sum(file.stat().st_size for file in describing)
    with new_folder(output, size_bytes=size_bytes, remedy=_REMEDY) as folder:
        sizes = {file.name: shutil.copyfile(file, folder / file.name).stat().st_size for file in describing}
        for number, (name, entries) in enumerate(cut.shards.items(), start=1):
            if _is_safetensors(cut):
                _write_safetensors(folder / name, entries)
            else:
                from minimax_tools.slices.torch_values import write_pth

                write_pth(folder / name, entries)
            # Each at once: all of a large slice would fill the memory first.
            sync_path(folder / name)
            sizes[name] = (folder / name).stat().st_size
            progress.advance(number, num_bytes=sum(entry.size_bytes for entry in entries))
        if _is_safetensors(cut):
            _write_index(folder, cut)
        # Digests of the source, not of the copy, so that a wrong copy shows.
        digests = digest_tensors(cut.entries) if with_digests else {}
        # Without its digest, a tensor's value is None.
        description = replace(cut.description, tensors={**cut.description.tensors, **digests})
        description.write(folder)
        sizes = _sizes_in(folder) | sizes
        _require_files(folder, sizes, named=output, step="run the same command again")
    return SliceFolder(
        folder=output,
        description=description,
        files=tuple(output / name for name in cut.shards),
        size_bytes=cut.size_bytes,
        file_sizes=sizes,
        is_new=True,
    )


def _sizes_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def _require_files(folder: Path, sizes: Mapping[str, int], *, named: Path, step: str) -> None:
    """Raise if a file of the slice in `folder` is missing, or has another size; the error names the folder `named`."""
    found = _sizes_in(folder) if folder.is_dir() else {}
    faults = [
        f"{name} has {found[name]} bytes, not {size_bytes}" if name in found else f"{name} is missing"
        for name, size_bytes in sizes.items()
        if found.get(name) != size_bytes
    ]
    if faults:
        raise CheckpointError(
            f"files of the slice {named} were removed or changed after they were written",
            found=list_faults(faults),
            next_step=f"Find out what else writes or cleans up there, then {step}.",
        )


def _write_safetensors(path: Path, entries: Sequence[TensorEntry]) -> None:
    with path.open("wb") as file:
        file.write(encode_header(entries))
        # All files of a source have one format.
        if entries[0].is_pickled:
            for entry in entries:
                file.writelines(read_pieces(entry))
            return
        file.flush()
        for path_of_source, ranges in groupby(join_ranges(entries), key=lambda byte_range: byte_range.file):
            with _open_source(path_of_source) as source:
                for byte_range in ranges:
                    _copy_range(byte_range, source.fileno(), file.fileno())


def _open_source(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened", found=str(error), next_step="Fetch the file again."
        ) from error


def _copy_range(byte_range: ByteRange, source: int, target: int) -> None:
    """Append a range of an open file to another.

    Raises:
        CheckpointError: The source has become shorter.
    """
    start = byte_range.start
    while start < byte_range.stop:
        size_bytes = min(byte_range.stop - start, _PIECE_BYTES)
        try:
            # The kernel copies, without loading the bytes into this process.
            count = os.copy_file_range(source, target, size_bytes, start)
        except (AttributeError, OSError):
            count = 0
        if count == 0:
            # Another system, two file systems, or the source's end.
            count = os.write(target, os.pread(source, min(size_bytes, _BUFFER_BYTES), start))
        if count == 0:
            raise CheckpointError(
                f"{byte_range.file} became shorter",
                expected=f"bytes {byte_range.start} to {byte_range.stop}",
                found=f"an end at {start}",
                next_step="Fetch the file again.",
            )
        start += count


def _write_index(folder: Path, cut: SliceCut) -> None:
    weight_map = {entry.name: file for file, entries in cut.shards.items() for entry in entries}
    index_json = {"metadata": {"total_size": cut.size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    with (folder / INDEX_FILE).open("w", encoding="utf-8") as file:
        json.dump(index_json, file, indent=2)
        file.write("\n")


def _describing_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint to be copied into a slice: config, tokenizer and the like."""
    for path in sorted(folder.iterdir()):
        is_describing = path.name.endswith(DESCRIBING_SUFFIXES) and not path.name.endswith(_INDEX_SUFFIX)
        if is_describing and path.name != SLICE_FILE and not path.name.startswith(".") and path.is_file():
            yield path


def _reuse_slice(cut: SliceCut, output: Path, *, with_digests: bool) -> SliceFolder:
    """Return the slice that the folder holds already, and add digests that its slice.json lacks.

    Raises:
        UsageError: The folder holds another slice, or none.
    """
    try:
        description = SliceDescription.read(output)
        existing = read_slice_folder(output)
        difference = _find_difference(cut, description, existing)
    except CheckpointError as error:
        difference = error.what
    if difference is not None:
        raise UsageError(
            f"{output} exists",
            expected="a new or empty folder, or one that holds this slice",
            found=difference,
            next_step="Name another --output, or remove it.",
        )
    if with_digests and None in description.tensors.values():
        description = replace(description, tensors=digest_tensors(cut.entries))
        description.write(output)
    return SliceFolder(
        folder=output,
        description=description,
        files=existing.files,
        size_bytes=cut.size_bytes,
        file_sizes=_sizes_in(output),
        is_new=False,
    )


def _find_difference(cut: SliceCut, description: SliceDescription, existing: TensorIndex) -> str | None:
    """Return the first difference between the cut and the slice that is there; every byte is compared."""
    if replace(description, tensors={}) != replace(cut.description, tensors={}):
        return f"another slice, of node {description.node}, cut from {description.source}"
    if (existing.folder / PTH_FILE).is_file() == _is_safetensors(cut):
        return "the slice in another format"
    if _read_config(existing.folder) != _read_config(cut.source.folder):
        return f"another {CONFIG_FILE}"
    if not set(existing.names) == description.tensors.keys() == cut.description.tensors.keys():
        return "a slice of other tensors"
    digests = digest_tensors(cut.entries)
    found = digest_tensors(existing[name] for name in digests)
    for entry in cut.entries:
        name = entry.name
        if describe_shape(existing[name]) != describe_shape(entry) or found[name] != digests[name]:
            return f"other bytes of {name}"
        if description.tensors[name] not in (None, digests[name]):
            return f"another digest of {name} in {SLICE_FILE}"
    return None


def _read_config(folder: Path) -> bytes | None:
    # A bare state dict has no config.json.
    path = folder / CONFIG_FILE
    return path.read_bytes() if path.is_file() else None


def _is_safetensors(cut: SliceCut) -> bool:
    return cut.file_format is FileFormat.SAFETENSORS
