"""PickledReader: tensors read one at a time from PyTorch's `.bin` files, without unpickling anything else."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.torch_files.header import PickledEntry, read_pickled_index
from minimax_tools.torch_files.stored import StoredTensor
from minimax_tools.torch_files.torch_file import refusing

# So much of a file at once where a tensor's elements are not what lies there in a row.
_PIECE_BYTES = 16 * 2**20


class PickledReader(CheckpointReader):
    """Reads single tensors of `.bin` files as `CheckpointReader` reads those of safetensors.

    Names, shapes, dtypes and places are known after opening, when no storage has been read. A tensor that is
    a view is read as such: only its own elements, put in a row. Beside the tensor itself, reading takes no
    more than a piece of 16 MiB. A tensor that is all of its storage is checked against the file's checksum.

    Args:
        path: A checkpoint's folder, or a single `.bin`, `.pt` or `.pth` file.
        index: The tensors to read; those of `path` where absent.

    Raises:
        CheckpointError: A file is missing, damaged or not torch.save's, holds no state dict or tensors that
            cannot be read, or the files contradict their index (see `read_pickled_index`).
    """

    def __init__(self, path: Path, *, index: TensorIndex | None = None) -> None:
        index = read_pickled_index(path) if index is None else index
        super().__init__(index.folder, index=index)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor on the CPU in the dtype it was saved with; only its own elements are read.

        The memory is fresh and contiguous. A tensor that repeats its elements (an expanded one) stays a view, so that
        no small file can ask for much memory.

        Raises:
            CheckpointError: There is no such tensor, or its file became shorter, unreadable or damaged.
        """
        entry = self._entry(name)
        if not entry.stored.repeats_elements:
            return super().read(name)
        return self._read_view(entry, entry.stored)

    def __enter__(self) -> PickledReader:
        return self

    def _entry(self, name: str) -> PickledEntry:
        entry = self.index[name]
        if not isinstance(entry, PickledEntry):
            raise TypeError(f"{name} is indexed as a tensor of {entry.file}, which is no .bin file")
        return entry

    def _fill(self, entry: TensorEntry, out: torch.Tensor) -> None:
        entry = self._entry(entry.name)
        if not entry.stored.is_verbatim:
            self._fill_by_pieces(entry, entry.stored, out)
            return
        super()._fill(entry, out)
        _check_crc32(entry, entry.stored, out)

    def _fill_by_pieces(self, entry: PickledEntry, stored: StoredTensor, out: torch.Tensor) -> None:
        """Fill `out` with a part of a tensor, halving it until what it spans in the file is small."""
        if stored.extent_bytes <= _PIECE_BYTES:
            out.copy_(self._read_view(entry, stored))
            return
        spans = [(size - 1) * stride for size, stride in zip(stored.shape, stored.stride, strict=True)]
        dim = spans.index(max(spans))
        half = stored.shape[dim] // 2
        for start, length in ((0, half), (half, stored.shape[dim] - half)):
            self._fill_by_pieces(entry, stored.narrow(dim, start, length), out.narrow(dim, start, length))

    def _read_view(self, entry: PickledEntry, stored: StoredTensor) -> torch.Tensor:
        """Read a tensor of `entry`, or a part of one, over the bytes from its first to its last element."""
        content = torch.empty(stored.extent_bytes, dtype=torch.uint8)
        place = TensorEntry(
            name=entry.name,
            file=entry.file,
            dtype=content.dtype,
            shape=tuple(content.shape),
            offset=stored.offset,
            size_bytes=stored.extent_bytes,
        )
        super()._fill(place, content)
        _check_crc32(entry, stored, content)
        # What a damaged file says of a tensor may be possible to note and still make no tensor.
        with refusing(entry.file, CheckpointError, next_step="Fetch the file again."):
            return stored.view(content)


def _check_crc32(entry: PickledEntry, stored: StoredTensor, content: torch.Tensor) -> None:
    """Compare the checksum of the storage, where `content` is all of it, as it lies in the file."""
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
