"""A reader of single tensors from PyTorch's `.bin` files, which unpickles nothing else."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.torch_files.header import PickledEntry, read_pickled_index
from minimax_tools.torch_files.stored import StoredTensor
from minimax_tools.torch_files.torch_file import refusing

# Most bytes of a file that are held beside a tensor whose elements do not lie in a row.
_PIECE_BYTES = 16 << 20


class PickledReader(CheckpointReader):
    """Reader of single tensors of `.bin` files, as `CheckpointReader` is of safetensors.

    Opening reads names, shapes, dtypes and places, and no storage. Reading takes the bytes from a tensor's first to its
    last element, and at most 16 MiB besides the tensor. A storage read whole, at once, is checked by its checksum.

    Args:
        path: A checkpoint's folder, or a single `.bin`, `.pt` or `.pth` file.
        index: Tensors to read. Default: all tensors of `path`.

    Raises:
        CheckpointError: A file is missing, damaged or not written by torch.save, holds no state dict or tensors
            that cannot be read, or the files contradict their index (see `read_pickled_index`).
    """

    def __init__(self, path: Path, *, index: TensorIndex | None = None) -> None:
        index = read_pickled_index(path) if index is None else index
        super().__init__(index.folder, index=index)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor on the CPU in the dtype it was saved with.

        The memory is new and contiguous. An expanded tensor, which repeats its elements, stays a view: so a small
        file cannot demand much memory.

        Raises:
            CheckpointError: There is no such tensor, or its file is cut, unreadable or damaged.
        """
        entry = _as_pickled(self.index[name])
        if entry.stored.repeats_elements:
            return self._read_view(entry, entry.stored)
        return super().read(name)

    def _fill(self, entry: TensorEntry, out: torch.Tensor) -> None:
        entry = _as_pickled(entry)
        # Verbatim: the bytes in the file are the values, in order.
        if not entry.stored.is_verbatim:
            self._fill_by_pieces(entry, entry.stored, out)
            return
        super()._fill(entry, out)
        _check_crc32(entry, entry.stored, out)

    def _fill_by_pieces(self, entry: PickledEntry, stored: StoredTensor, out: torch.Tensor) -> None:
        """Fill `out` with a tensor, halved until each part spans at most `_PIECE_BYTES` of the file."""
        if stored.extent_bytes <= _PIECE_BYTES:
            out.copy_(self._read_view(entry, stored))
            return
        spans = [(size - 1) * stride for size, stride in zip(stored.shape, stored.stride, strict=True)]
        # The dim that spans most of the file.
        dim = spans.index(max(spans))
        half = stored.shape[dim] // 2
        for start, length in ((0, half), (half, stored.shape[dim] - half)):
            self._fill_by_pieces(entry, stored.narrow(dim, start, length), out.narrow(dim, start, length))

    def _read_view(self, entry: PickledEntry, stored: StoredTensor) -> torch.Tensor:
        """Read a tensor of `entry`, or a part of it, from the bytes of its first to its last element."""
        content = torch.empty(stored.extent_bytes, dtype=torch.uint8)
        extent = replace(entry, offset=stored.offset, size_bytes=stored.extent_bytes)
        super()._fill(extent, content)
        _check_crc32(entry, stored, content)
        # A damaged file may describe a tensor that torch refuses.
        with refusing(entry.file, CheckpointError, next_step="Fetch the file again."):
            return stored.view(content)


def _as_pickled(entry: TensorEntry) -> PickledEntry:
    if not isinstance(entry, PickledEntry):
        raise TypeError(f"{entry.name} is a tensor of {entry.file}, which is not a .bin file")
    return entry


def _check_crc32(entry: PickledEntry, stored: StoredTensor, content: torch.Tensor) -> None:
    """Verify the checksum of the storage, if `content` is all of it."""
    storage = stored.storage
    if storage.crc32 is None or (stored.offset, stored.extent_bytes) != (storage.offset, storage.size_bytes):
        return
    if zlib.crc32(content.view(-1).view(torch.uint8).numpy().data) != storage.crc32:
        raise CheckpointError(
            f"{entry.name} in {entry.file} is damaged",
            expected=f"checksum {storage.crc32:08x}",
            found="another one",
            next_step="Fetch the file again.",
        )
