"""A slice's folder: its tensors byte for byte, their index, the files that describe the model, and slice.json.

The folder is written under a temporary name and renamed, so a folder with the final name is complete.

Sources are safetensors or torch files (`.bin`), slices are safetensors or one torch file (`.pth`).

Byte ranges, copied from file to file by the kernel.

`copy_file_range` copies bytes without loading them into this process. Where the system does not support it, for
example between two file systems, the bytes pass through one small buffer.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from minimax_tools.checkpoint.header import ByteRange, TensorEntry, encode_header, join_ranges
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.weight_files import INDEX_FILE
from minimax_tools.command_line.progress import NoProgress, Progress
from minimax_tools.errors import CheckpointError, UsageError, list_faults
from minimax_tools.hub.checkpoint_folder import DESCRIBING_SUFFIXES
from minimax_tools.machine.files import new_folder, remove_abandoned, sync_path
from minimax_tools.model.spec import CONFIG_FILE
from minimax_tools.slices.cut import SliceCut
from minimax_tools.slices.description import SLICE_FILE, SliceDescription
from minimax_tools.slices.digest import digest_tensors
from minimax_tools.slices.layout import PTH_FILE, FileFormat

# Bytes copied by one call: small enough to react to an interrupt, large enough to cost no time.
_PIECE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20
# Errors of a system, or of a pair of file systems, that cannot copy in the kernel.
_UNSUPPORTED = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


def copy_ranges(ranges: Iterable[ByteRange], target: BinaryIO) -> None:
    """Append byte ranges to a file that is open for writing.

    Raises:
        CheckpointError: A source file cannot be opened, or has become shorter.
        OSError: The target cannot be written, or a source file cannot be read.
    """
    target.flush()
    for file, group in groupby(ranges, key=lambda byte_range: byte_range.file):
        try:
            source = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be opened", found=str(error), next_step="Fetch the file again."
            ) from error
        try:
            for byte_range in group:
                _copy_range(byte_range, source, target.fileno())
        finally:
            os.close(source)


def _copy_range(byte_range: ByteRange, source: int, target: int) -> None:
    position = _copy_in_kernel(source, target, byte_range.start, byte_range.stop)
    position = _copy_through_buffer(source, target, position, byte_range.stop)
    if position < byte_range.stop:
        raise CheckpointError(
            f"{byte_range.file} became shorter",
            expected=f"bytes {byte_range.start} to {byte_range.stop}",
            found=f"an end at {position}",
            next_step="Fetch the file again.",
        )


def _copy_in_kernel(source: int, target: int, start: int, stop: int) -> int:
    """Copy with `copy_file_range` as far as it works, and return the position reached."""
    # Systems other than Linux lack the call.
    if not hasattr(os, "copy_file_range"):
        return start
    while start < stop:
        try:
            count = os.copy_file_range(source, target, min(stop - start, _PIECE_BYTES), start)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return start
        if count == 0:
            # The source has ended, or its file system cannot copy this way. The buffer will tell.
            return start
        start += count
    return start


def _copy_through_buffer(source: int, target: int, start: int, stop: int) -> int:
    """Copy up to `stop` or the source's end, and return the position reached."""
    if start == stop:
        return start
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    while start < stop:
        count = os.preadv(source, [buffer[: min(stop - start, _BUFFER_BYTES)]], start)
        if count == 0:
            return start
        written = 0
        while written < count:
            written += os.write(target, buffer[written:count])
        start += count
    return start


# The source's index files are not copied: a slice has its own index.
_INDEX_SUFFIX = ".index.json"
_REMEDY = "Choose an --output with more room, or make room."


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
        """Check that all files that the folder held when it was written or found are there, of the same sizes.

        Raises:
            CheckpointError: Something removed or cut one since.
        """
        step = "remove the folder and run the same command again"
        _require_files(self.folder, self.file_sizes, named=self.folder, step=step)


def write_slice(
    cut: SliceCut, output: Path, *, with_digests: bool = False, progress: Progress | None = None
) -> SliceFolder:
    """Write a slice, or find the same slice there already, equal byte for byte.

    Memory in use:

    | from | to safetensors | to a torch file |
    |---|---|---|
    | safetensors | none: the kernel copies the bytes | mapped pages, which the system may drop |
    | torch files | one tensor at a time | the whole slice |

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
    if not pth.is_file():
        return TensorIndex.from_folder(folder)
    # This import needs torch, which safetensors files do not.
    from minimax_tools.torch_files.header import read_pickled_index

    return read_pickled_index(pth)


def occupied_error(output: Path, *, expected: str, found: str) -> UsageError:
    """Return the error for a folder that holds something else than the slice to be written."""
    return UsageError(
        f"{output} exists",
        expected=f"a new or empty folder, or {expected}",
        found=found,
        next_step="Name another --output, or remove it.",
    )


def _write_new_slice(cut: SliceCut, output: Path, *, with_digests: bool, progress: Progress) -> SliceFolder:
    describing = tuple(_describing_files(cut.source.folder))
    size_bytes = cut.size_bytes + sum(file.stat().st_size for file in describing)
    with new_folder(output, size_bytes=size_bytes, remedy=_REMEDY) as folder:
        sizes = {file.name: shutil.copyfile(file, folder / file.name).stat().st_size for file in describing}
        write_file = _write_safetensors if _is_safetensors(cut) else _write_pth
        for number, (name, entries) in enumerate(cut.shards.items(), start=1):
            write_file(folder / name, cut.source.headers, entries)
            # Each at once: all of a large slice would fill the memory first.
            sync_path(folder / name)
            sizes[name] = (folder / name).stat().st_size
            progress.advance(number, num_bytes=sum(entry.size_bytes for entry in entries))
        if _is_safetensors(cut):
            _write_index(folder, cut)
        # Digests of the source, not of the copy, so that a wrong copy shows.
        digests = _digest_source(cut) if with_digests else {}
        # Without its digest, a tensor's value is None.
        description = replace(cut.description, tensors={**cut.description.tensors, **digests})
        description.write(folder)
        sizes |= {path.name: path.stat().st_size for path in folder.iterdir() if path.name not in sizes}
        _require_files(folder, sizes, named=output, step="run the same command again")
    return SliceFolder(
        folder=output,
        description=description,
        files=tuple(output / name for name in cut.shards),
        size_bytes=cut.size_bytes,
        file_sizes=sizes,
        is_new=True,
    )


def _require_files(folder: Path, sizes: Mapping[str, int], *, named: Path, step: str) -> None:
    """Raise if a file of the slice in `folder` is missing, or has another size; the error names the folder `named`."""
    faults = []
    for name, size_bytes in sizes.items():
        path = folder / name
        found_bytes = path.stat().st_size if path.is_file() else None
        if found_bytes is None:
            faults.append(f"{name} is missing")
        elif found_bytes != size_bytes:
            faults.append(f"{name} has {found_bytes} bytes, not {size_bytes}")
    if faults:
        raise CheckpointError(
            f"files of the slice {named} were removed or changed after they were written",
            found=list_faults(faults),
            next_step=f"Find out what else writes or cleans up there, then {step}.",
        )


def _write_safetensors(path: Path, index: TensorIndex, entries: Sequence[TensorEntry]) -> None:
    with path.open("wb") as file:
        file.write(encode_header(entries))
        # All files of a source have one format.
        if entries[0].is_pickled:
            # This import needs torch, which safetensors files do not.
            from minimax_tools.slices.torch_values import read_values

            for _, content in read_values(index, [entry.name for entry in entries]):
                file.write(content)
        else:
            copy_ranges(join_ranges(entries), file)


def _write_pth(path: Path, index: TensorIndex, entries: Sequence[TensorEntry]) -> None:
    # Torch writes the file.
    from minimax_tools.slices.torch_values import write_pth

    write_pth(path, index, entries)


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
        # Digests read every byte, so they come last.
        if difference is None:
            digests = _digest_source(cut)
            difference = _find_other_bytes(digests, description, existing)
    except CheckpointError as error:
        difference = error.what
    if difference is not None:
        raise occupied_error(output, expected="one that holds this slice", found=difference)
    if with_digests and description.tensors != digests:
        description = replace(description, tensors=digests)
        description.write(output)
    return SliceFolder(
        folder=output,
        description=description,
        files=existing.files,
        size_bytes=cut.size_bytes,
        file_sizes={path.name: path.stat().st_size for path in output.iterdir() if path.is_file()},
        is_new=False,
    )


def _find_difference(cut: SliceCut, description: SliceDescription, existing: TensorIndex) -> str | None:
    """Return the first difference, tensor bytes aside, between the cut and the slice that is there.

    Args:
        cut: The slice to be written.
        description: The slice.json that is there.
        existing: The tensors that are there.
    """
    if replace(description, tensors={}) != replace(cut.description, tensors={}):
        return f"another slice, of node {description.node}, cut from {description.source}"
    if (existing.folder / PTH_FILE).is_file() == _is_safetensors(cut):
        return "the slice in another format"
    if _read_config(existing.folder) != _read_config(cut.source.folder):
        return f"another {CONFIG_FILE}"
    if not set(existing.names) == description.tensors.keys() == cut.description.tensors.keys():
        return "a slice of other tensors"
    for entry in cut.entries:
        existing_entry = existing[entry.name]
        if (existing_entry.dtype, existing_entry.shape) != (entry.dtype, entry.shape):
            return f"another shape or dtype of {entry.name}"
    return None


def _read_config(folder: Path) -> bytes | None:
    # A bare state dict has no config.json.
    path = folder / CONFIG_FILE
    return path.read_bytes() if path.is_file() else None


def _find_other_bytes(
    digests: Mapping[str, str], description: SliceDescription, existing: TensorIndex
) -> str | None:
    """Return the first difference between the source's digests and the slice that is there."""
    for name, found in digest_tensors([existing[name] for name in digests], existing):
        if description.tensors[name] not in (None, digests[name]):
            return f"another digest of {name} in {SLICE_FILE}"
        if found != digests[name]:
            return f"other bytes of {name}"
    return None


def _digest_source(cut: SliceCut) -> dict[str, str]:
    return dict(digest_tensors(cut.entries, cut.source.headers))


def _is_safetensors(cut: SliceCut) -> bool:
    return cut.file_format is FileFormat.SAFETENSORS
