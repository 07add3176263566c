"""Values that need torch: tensors of `.bin` files, and slices that are written as one `.pth` file.

Nobody imports this module before such a file is at hand, because torch takes seconds to load.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.torch_files.reader import PickledReader


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
