"""Digests of stored tensors: sha256 over their bytes in row-major order.

Values that need torch: tensors of `.bin` files, and slices that are written as one `.pth` file.

Nobody imports this module before such a file is at hand, because torch takes seconds to load.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.pickled import PickledReader
from minimax_tools.errors import CheckpointError


def read_values(index: TensorIndex, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
    """Yield tensors of `.bin` files by name: their bytes as they lie in a safetensors file.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    with PickledReader(index.folder, index=index) as reader:
        for name in names:
            yield name, reader.read(name).contiguous().view(-1).view(torch.uint8).numpy().data


def write_pth(path: Path, index: TensorIndex, entries: Sequence[TensorEntry]) -> None:
    """Write tensors of any files as one file of torch.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    if entries[0].is_pickled:
        with PickledReader(index.folder, index=index) as reader:
            state_dict = {entry.name: reader.read(entry.name).contiguous() for entry in entries}
    else:
        maps = {file: _map_file(file) for file in {entry.file for entry in entries}}
        state_dict = {entry.name: _view_map(maps[entry.file], entry) for entry in entries}
    torch.save(state_dict, path)


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # Torch needs writable memory; with ACCESS_COPY nothing reaches the file.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _view_map(file_map: mmap.mmap, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor over the file's pages, with a storage of its own size: torch saves whole storages."""
    dtype = entry.dtype.as_torch()
    if entry.size_bytes == 0:
        return torch.empty(entry.shape, dtype=dtype)
    flat = torch.frombuffer(file_map, dtype=torch.uint8, count=entry.size_bytes, offset=entry.offset)
    return flat.view(dtype).view(entry.shape)


_BUFFER_BYTES = 1 << 20


def digest_tensors(entries: Sequence[TensorEntry], index: TensorIndex) -> Iterator[tuple[str, str]]:
    """Yield name and sha256 of tensors of an index, in turn; it is equal for a safetensors and a `.bin` copy.

    A `.bin` tensor is loaded whole, a safetensors one in small pieces.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    if any(entry.is_pickled for entry in entries):
        # This import needs torch, which safetensors files do not.

        for name, content in read_values(index, [entry.name for entry in entries]):
            yield name, hashlib.sha256(content).hexdigest()
    else:
        for entry in entries:
            yield entry.name, _digest_range(entry)


def _digest_range(entry: TensorEntry) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    remaining = entry.size_bytes
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            while remaining and (count := file.readinto(buffer[: min(remaining, _BUFFER_BYTES)])):
                digest.update(buffer[:count])
                remaining -= count
    except OSError as error:
        raise _unreadable(entry, str(error)) from error
    if remaining:
        raise _unreadable(entry, f"an end of the file {remaining} bytes too early")
    return digest.hexdigest()


def describe_shape(entry: TensorEntry) -> str:
    """Return dtype and shape, which a digest of the bytes does not cover, such as `torch.bfloat16 [64, 32]`."""
    return f"{entry.dtype} {list(entry.shape)}"


def _unreadable(entry: TensorEntry, found: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.name} cannot be read from {entry.file}", found=found, next_step="Fetch the file again."
    )
