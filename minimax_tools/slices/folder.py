"""A slice's folder: its tensors byte for byte, their index, the files that describe the model, and slice.json.

The folder is written under a temporary name and renamed, so a folder with the final name is complete.
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

# The source's index files are not copied: a slice has its own index.
_INDEX_SUFFIX = ".index.json"
_REMEDY = "Choose an --output with more room, or make room."


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFolder:
    """A slice on the disk.

    Args:
        folder: Its folder.
        description: Content of its slice.json.
        files: Its weight files.
        size_bytes: Size of its tensors' data.
        is_new: True if it was written now, False if it was there already.
    """

    folder: Path
    description: SliceDescription
    files: tuple[Path, ...]
    size_bytes: int
    is_new: bool


def write_slice(
    cut: SliceCut, output: Path, *, with_digests: bool = False, progress: Progress | None = None
) -> SliceFolder:
    """Write a slice, or find the same slice there already, equal byte for byte.

    Memory in use:

    | from | to safetensors | to `.pth` |
    |---|---|---|
    | safetensors | none: the kernel copies the bytes | mapped pages, which the system may drop |
    | `.bin` | one tensor at a time | the whole slice |

    Args:
        cut: The slice.
        output: A folder that does not exist yet, is empty, or holds the same slice.
        with_digests: Write each tensor's sha256 into slice.json; this reads all tensors once more.
        progress: Reports each file.

    Raises:
        UsageError: `output` holds something else.
        CheckpointError: There is no room, a tensor cannot be read, or the folder cannot be written.
    """
    progress = NoProgress() if progress is None else progress
    with cut.source.open() as reader:
        if output.is_dir() and any(output.iterdir()):
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
            # Digests of the source, not of the copy: so that a wrong copy shows.
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
    """Open a reader of a slice's tensors, in either format.

    Raises:
        CheckpointError: Its files are missing or damaged, or contradict its index.
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
        # Torch needs writable memory; with ACCESS_COPY nothing reaches the file.
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def _mapped(entry: TensorEntry, content: mmap.mmap) -> torch.Tensor:
    """Return the tensor over the file's pages, with a storage of its size, because torch saves storages."""
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


def _find_same(cut: SliceCut, output: Path, reader: CheckpointReader, *, with_digests: bool) -> SliceFolder:
    """Return the slice that the folder holds already, and add digests that its slice.json lacks.

    Raises:
        UsageError: The folder holds another slice, or none.
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
    """Return the first difference, tensor bytes aside, between the cut and the slice that is there."""
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
    # A bare state dict has no config.json.
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
