"""Values that need torch: tensors of `.bin` files, and slices that are written as one `.pth` file.

Nobody imports this module before such a file is at hand, because torch takes seconds to load.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader


def read_bytes(entry: TensorEntry) -> memoryview:
    """Read a tensor of a `.bin` file: its bytes as they lie in a safetensors file.

    Raises:
        CheckpointError: It cannot be read.
    """
    content: memoryview = _read(entry).view(-1).view(torch.uint8).numpy().data
    return content


def write_pth(path: Path, entries: Sequence[TensorEntry]) -> None:
    """Write tensors of any files as one file of torch.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    maps = {file: _map_file(file) for file in {entry.file for entry in entries if not entry.is_pickled}}
    torch.save(
        {
            entry.name: _read(entry) if entry.is_pickled else _view_map(maps[entry.file], entry)
            for entry in entries
        },
        path,
    )


def _read(entry: TensorEntry) -> torch.Tensor:
    folder = entry.file.parent
    with CheckpointReader(folder, index=TensorIndex.of(folder, [entry])) as reader:
        return reader.read(entry.name).contiguous()


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
