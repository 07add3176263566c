"""A slice's folder: its tensors byte for byte, their index, config.json, what describes the model, and slice.json.

It is written to a temporary sibling and renamed, so what bears its name is whole.
"""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minimax_tools.checkpoint.header import TensorEntry, encode_header
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.weight_files import INDEX_FILE
from minimax_tools.command_line.progress import NoProgress, Progress
from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.hub.checkpoint_folder import CONFIG_FILE, DESCRIBING_SUFFIXES
from minimax_tools.machine.new_folder import new_folder, sync_path
from minimax_tools.slices.byte_ranges import copy_ranges, join_ranges
from minimax_tools.slices.cut import PTH_FILE, FileFormat, SliceCut
from minimax_tools.slices.description import SLICE_FILE, SliceDescription
from minimax_tools.slices.digest import digest_tensor, tensor_bytes
from minimax_tools.torch_files.header import PickledEntry
from minimax_tools.torch_files.reader import PickledReader

# What tells where tensors lie tells of the source's files, and the slice has its own.
_INDEX_SUFFIX = ".index.json"
_REMEDY = "Name an --output with more room, or make room."


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFolder:
    """A slice on the disk.

    Args:
        folder: Where it lies.
        description: What its slice.json says.
        files: Its weight files.
        size_bytes: Size of its tensors' data.
        is_new: Whether it was written now; else it was there already.
    """

    folder: Path
    description: SliceDescription
    files: tuple[Path, ...]
    size_bytes: int
    is_new: bool


def write_slice(
    cut: SliceCut, output: Path, *, with_digests: bool = False, progress: Progress | None = None
) -> SliceFolder:
    """Write a slice; one that is there already, every tensor byte for byte, is left as it is.

    From safetensors the kernel copies: nothing of the tensors passes through this process, whatever their size. From
    `.bin` files one tensor is in memory at a time. A `.pth` file is written by torch from mapped safetensors, whose
    pages the system may drop; from `.bin` files it takes as much memory as the slice.

    Args:
        cut: What is to be written.
        output: A folder that does not exist yet, is empty, or holds the same slice.
        with_digests: Whether slice.json gets each tensor's sha256: everything is read once more for it.
        progress: Told of each file.

    Raises:
        UsageError: `output` holds something else.
        CheckpointError: There is no room, or a tensor cannot be read or the folder not be written.
    """
    progress = NoProgress() if progress is None else progress
    with cut.source.open() as reader:
        if _holds_something(output):
            return _find_same(cut, output, reader, with_digests=with_digests)
        describing = tuple(_describing_files(cut.source.folder))
        size_bytes = cut.size_bytes + sum(file.stat().st_size for file in describing)
        with new_folder(output, size_bytes=size_bytes, remedy=_REMEDY) as folder:
            for file in describing:
                shutil.copyfile(file, folder / file.name)
            for number, (name, shard) in enumerate(cut.shards.items(), start=1):
                (_write_shard if _is_safetensors(cut) else _write_pth)(folder / name, shard, reader)
                sync_path(folder / name)
                progress.advance(number, num_bytes=sum(entry.size_bytes for entry in shard))
            if _is_safetensors(cut):
                _write_index(folder, cut)
            # Of what was read, not of what was written: so that a copy gone wrong shows.
            digests = (
                {entry.name: digest_tensor(reader, entry) for entry in cut.entries} if with_digests else {}
            )
            description = replace(cut.description, tensors={**cut.description.tensors, **digests})
            description.write(folder)
            for path in (*folder.iterdir(), folder):
                sync_path(path)
    files = tuple(output / name for name in cut.shards)
    return SliceFolder(
        folder=output, description=description, files=files, size_bytes=cut.size_bytes, is_new=True
    )


def open_slice(folder: Path) -> CheckpointReader:
    """A reader of a slice's tensors, in whichever format they are stored.

    Raises:
        CheckpointError: Its files are missing or damaged, or contradict their index.
    """
    pth = folder / PTH_FILE
    return PickledReader(pth) if pth.is_file() else CheckpointReader(folder)


def _write_shard(path: Path, entries: Sequence[TensorEntry], reader: CheckpointReader) -> None:
    with path.open("wb") as file:
        file.write(encode_header(entries))
        if not isinstance(entries[0], PickledEntry):
            copy_ranges(join_ranges(entries), file)
            return
        for entry in entries:
            file.write(tensor_bytes(reader.read(entry.name)))


def _write_pth(path: Path, entries: Sequence[TensorEntry], reader: CheckpointReader) -> None:
    if isinstance(entries[0], PickledEntry):
        torch.save({entry.name: reader.read(entry.name).contiguous() for entry in entries}, path)
        return
    maps = {file: _map(file) for file in {entry.file for entry in entries}}
    torch.save({entry.name: _mapped(entry, maps[entry.file]) for entry in entries}, path)


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        # Writable to torch, and nothing that is written would reach the file.
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def _mapped(entry: TensorEntry, content: mmap.mmap) -> torch.Tensor:
    """The tensor over the file's pages, with a storage of its own size: torch saves storages."""
    if entry.size_bytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    flat = torch.frombuffer(content, dtype=torch.uint8, count=entry.size_bytes, offset=entry.offset)
    return flat.view(entry.dtype).view(entry.shape)


def _write_index(folder: Path, cut: SliceCut) -> None:
    weight_map = {entry.name: file for file, shard in cut.shards.items() for entry in shard}
    content = {"metadata": {"total_size": cut.size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    with (folder / INDEX_FILE).open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


def _describing_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        is_describing = path.name.endswith(DESCRIBING_SUFFIXES) and not path.name.endswith(_INDEX_SUFFIX)
        if is_describing and path.name != SLICE_FILE and not path.name.startswith(".") and path.is_file():
            yield path


def _holds_something(output: Path) -> bool:
    return output.is_dir() and any(output.iterdir())


def _find_same(cut: SliceCut, output: Path, reader: CheckpointReader, *, with_digests: bool) -> SliceFolder:
    """The slice that is there already, where it is the same; digests that it lacks are added.

    Raises:
        UsageError: It is another, or none.
    """
    try:
        description = SliceDescription.read(output)
        with open_slice(output) as existing:
            difference = _find_difference(cut, description, existing)
            digests = (
                {} if difference else {entry.name: digest_tensor(reader, entry) for entry in cut.entries}
            )
            difference = difference or _find_other_bytes(digests, description, existing)
            files = existing.index.files
    except CheckpointError as error:
        difference = error.what
    if difference is not None:
        raise UsageError(
            f"{output} exists",
            expected="a new or empty folder, or one that holds this slice",
            found=difference,
            next_step="Name another --output, or remove it.",
        )
    if with_digests and description.tensors != digests:
        description = replace(description, tensors=digests)
        description.write(output)
    return SliceFolder(
        folder=output, description=description, files=files, size_bytes=cut.size_bytes, is_new=False
    )


def _find_difference(cut: SliceCut, found: SliceDescription, existing: CheckpointReader) -> str | None:
    """What is first found to differ, bytes aside, between a slice that is to be written and one that is there."""
    if replace(found, tensors={}) != replace(cut.description, tensors={}):
        return f"another slice, of node {found.node}, cut from {found.source}"
    if (existing.folder / PTH_FILE).is_file() == _is_safetensors(cut):
        return "the slice in another format"
    if _read_config(existing.folder) != _read_config(cut.source.folder):
        return f"another {CONFIG_FILE}"
    if not set(existing.index.names) == found.tensors.keys() == cut.description.tensors.keys():
        return "a slice of other tensors"
    for entry in cut.entries:
        other = existing.index[entry.name]
        if (other.dtype, other.shape) != (entry.dtype, entry.shape):
            return f"another shape or dtype of {entry.name}"
    return None


def _read_config(folder: Path) -> bytes | None:
    # A state dict that was saved by itself has none.
    path = folder / CONFIG_FILE
    return path.read_bytes() if path.is_file() else None


def _find_other_bytes(
    digests: Mapping[str, str], found: SliceDescription, existing: CheckpointReader
) -> str | None:
    for name, digest in digests.items():
        if found.tensors[name] not in (None, digest):
            return f"another digest of {name} in {SLICE_FILE}"
        if digest_tensor(existing, existing.index[name]) != digest:
            return f"other bytes of {name}"
    return None


def _is_safetensors(cut: SliceCut) -> bool:
    return cut.file_format is FileFormat.SAFETENSORS
