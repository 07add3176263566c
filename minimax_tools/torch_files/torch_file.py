"""Values of a file that torch.save wrote, read without running anything in it.

A file holds pickles, which describe the saved value, and storages: the bytes of its tensors. Both layouts are read:

| layout | written by | content |
|---|---|---|
| zip archive | torch since 1.6 | a pickle data.pkl, and each storage as data/KEY |
| stream | older versions | five pickles (mark, version, system, value, keys), then the storages |

`inert` reads the pickles, and `rebuild` has the names that become values. A storage is read only when a tensor is
wanted.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minimax_tools.errors import CannotRunError
from minimax_tools.torch_files.inert import Vocabulary, load_inert
from minimax_tools.torch_files.rebuild import parse_storage_id, torch_vocabulary
from minimax_tools.torch_files.stored import Storage, StorageId, StoredTensor

# First bytes of a zip archive and of each record in it; value of a stream's first pickle; first bytes of the text that
# Git LFS puts in a file's place.
_ZIP_MAGIC = b"PK\x03\x04"
_STREAM_MAGIC = 0x1950A86A20F9469CFC6C
_POINTER_MAGIC = b"version https://git-lfs"
# Header of a zip record: it begins with `_ZIP_MAGIC` and ends with the lengths of name and extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
# Number of elements, before each storage of a stream.
_NUM_ELEMENTS = struct.Struct("<q")

# Errors of zipfile, pickle, struct and torch on malformed bytes.
_FAULTS = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_value(path: Path) -> Any:
    """Read the saved value: CPU tensors, containers and numbers; other objects as `InertRecord`s.

    Each storage is read once, and its tensors share that memory. Memory stays at the file's size.

    Raises:
        OSError, ValueError, and others: See `refusing`.
    """
    with path.open("rb") as file:
        layout = _open_layout(file)
        contents: dict[str, torch.Tensor] = {}

        def make_tensor(stored: StoredTensor) -> torch.Tensor:
            # `stored.storage` may be a window of this one: the part of it that a view saved by an old torch has.
            storage = layout.storages[stored.storage.key]
            if storage.key not in contents:
                contents[storage.key] = _read_storage(file, storage)
            start = stored.offset - storage.offset
            return stored.view(contents[storage.key].narrow(0, start, stored.extent_bytes))

        return layout.load(make_tensor)


def read_structure(path: Path) -> Any:
    """Read the saved value with every tensor as its `StoredTensor`; no storage is read.

    Raises:
        OSError, ValueError, and others: See `refusing`.
    """
    with path.open("rb") as file:
        return _open_layout(file).load(lambda stored: stored)


@contextlib.contextmanager
def refusing(path: Path, error_type: type[CannotRunError], *, next_step: str) -> Iterator[None]:
    """Translate errors in the block, which reads a file, into an `error_type` that names the file.

    Raises:
        CannotRunError: The file is missing, or it is damaged or foreign; for the latter `next_step` is given.
    """
    try:
        yield
    except OSError as error:
        raise error_type(
            f"cannot read {path}",
            found=error.strerror or str(error),
            next_step="Check the path, or copy the file again.",
        ) from error
    except _FAULTS as error:
        raise error_type(
            f"{path} is damaged, or torch.save did not write it",
            found=f"{type(error).__name__}: {error}",
            next_step=next_step,
        ) from error


def _open_layout(file: io.BufferedReader) -> _ZipArchive | _PickleStream:
    magic = file.read(len(_POINTER_MAGIC))
    if magic == _POINTER_MAGIC:
        raise ValueError("it is a Git LFS pointer: the file itself was never fetched")
    file.seek(0)
    return _ZipArchive(file) if magic.startswith(_ZIP_MAGIC) else _PickleStream(file)


class _ZipArchive:
    """A zip of uncompressed records; `storages` are found while the value is loaded."""

    def __init__(self, file: io.BufferedReader) -> None:
        self.storages: dict[str, Storage] = {}
        self._file = file
        with zipfile.ZipFile(file) as archive:
            self._records = {record.filename: record for record in archive.infolist()}
        pickles = [name for name in self._records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError(f"the archive holds {len(pickles)} files data.pkl, not one")
        self._folder = pickles[0].removesuffix("data.pkl")
        # Overlapping records could need more memory than the file has.
        if sum(record.file_size for record in self._records.values()) > _size_bytes(file):
            raise ValueError("the archive's records are larger than the archive")

    def load(self, make_tensor: Callable[[StoredTensor], Any]) -> Any:
        if self._folder + "byteorder" in self._records and self._read_record("byteorder") != b"little":
            raise ValueError("the storages are not little-endian")
        pickle_file = io.BytesIO(self._read_record("data.pkl"))
        return load_inert(pickle_file, torch_vocabulary(self._find_storage, make_tensor))

    def _find_storage(self, storage_id: StorageId) -> Storage:
        """Return the whole storage, also for a window of it."""
        key = storage_id.key
        if key not in self.storages:
            self.storages[key] = self._find_record(f"data/{key}", key=key)
        storage = self.storages[key]
        if storage.size_bytes != storage_id.size_bytes:
            raise ValueError(
                f"storage {key} has {storage.size_bytes} bytes, the pickle says {storage_id.size_bytes}"
            )
        return replace(storage, dtype=storage_id.dtype)

    def _read_record(self, name: str) -> bytes:
        return _read_storage(self._file, self._find_record(name, key=name)).numpy().tobytes()

    def _find_record(self, name: str, *, key: str) -> Storage:
        """Return the place of a record's bytes as a storage of uint8."""
        record = self._records.get(self._folder + name)
        if record is None:
            raise ValueError(f"the archive holds no {name}")
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise ValueError(f"{name} is compressed, which torch.save never does")
        header = _read_exactly(self._file, _LOCAL_HEADER.size, record.header_offset)
        mark, *lengths = _LOCAL_HEADER.unpack(header)
        if mark != _ZIP_MAGIC:
            raise ValueError(f"{name} does not lie where the archive says")
        offset = record.header_offset + _LOCAL_HEADER.size + sum(lengths)
        _check_inside(self._file, offset, record.file_size)
        # torch writes zero when it leaves the checksum out.
        return Storage(
            key=key, dtype=torch.uint8, offset=offset, size_bytes=record.file_size, crc32=record.CRC or None
        )


class _PickleStream:
    """A stream of pickles and storages; `storages` are found while the value is loaded."""

    def __init__(self, file: io.BufferedReader) -> None:
        self.storages: dict[str, Storage] = {}
        self._file = file
        # The storages that the value names, by key.
        self._ids: dict[str, StorageId] = {}

    def load(self, make_tensor: Callable[[StoredTensor], Any]) -> Any:
        # Makes no tensor of what it reads, and notes each storage that is named.
        noting = Vocabulary(persistent_load=self._note_storage)
        if load_inert(self._file, noting) != _STREAM_MAGIC:
            raise ValueError("the file does not begin with torch.save's mark")
        for _ in ("version", "system"):
            load_inert(self._file, noting)
        start = self._file.tell()
        # The value is read twice: the storages come after it, and a tensor needs its storage's place.
        load_inert(self._file, noting)
        self._find_storages(load_inert(self._file, noting))
        self._file.seek(start)
        return load_inert(self._file, torch_vocabulary(self._find_storage, make_tensor))

    def _find_storage(self, storage_id: StorageId) -> Storage:
        """Return the whole storage, also for a window of it."""
        return replace(self.storages[storage_id.key], dtype=storage_id.dtype)

    def _note_storage(self, persistent_id: Any) -> None:
        storage_id = parse_storage_id(persistent_id)
        if storage_id is None:
            return
        first = self._ids.setdefault(storage_id.key, storage_id)
        if first.size_bytes != storage_id.size_bytes:
            raise ValueError(f"storage {storage_id.key} has two sizes")

    def _find_storages(self, keys: Any) -> None:
        if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(self._ids):
            raise ValueError("the storages are not those that the value names")
        position = self._file.tell()
        for key in map(str, keys):
            storage_id = self._ids[key]
            (num_elements,) = _NUM_ELEMENTS.unpack(_read_exactly(self._file, _NUM_ELEMENTS.size, position))
            if num_elements != storage_id.num_elements:
                raise ValueError(f"storage {key} has {num_elements} elements, not {storage_id.num_elements}")
            position += _NUM_ELEMENTS.size
            _check_inside(self._file, position, storage_id.size_bytes)
            self.storages[key] = Storage(
                key=key, dtype=storage_id.dtype, offset=position, size_bytes=storage_id.size_bytes
            )
            position += storage_id.size_bytes


def _read_storage(file: io.BufferedReader, storage: Storage) -> torch.Tensor:
    """Read a storage or record as uint8 [size_bytes], and verify its checksum if it has one."""
    content = torch.empty(storage.size_bytes, dtype=torch.uint8)
    view = content.numpy().data
    position = 0
    while position < storage.size_bytes:
        count = os.preadv(file.fileno(), [view[position:]], storage.offset + position)
        if not count:
            raise EOFError("the file became shorter")
        position += count
    if storage.crc32 is not None and zlib.crc32(view) != storage.crc32:
        raise ValueError(f"{storage.key} does not match its checksum")
    return content


def _read_exactly(file: io.BufferedReader, size_bytes: int, offset: int) -> bytes:
    # Past the file's buffer, which would read far more than these few bytes.
    content = os.pread(file.fileno(), size_bytes, offset)
    if len(content) != size_bytes:
        raise EOFError("the file ends too early")
    return content


def _check_inside(file: io.BufferedReader, offset: int, size_bytes: int) -> None:
    if not 0 <= size_bytes <= _size_bytes(file) - offset:
        raise EOFError("the file ends in the middle of a storage")


def _size_bytes(file: io.BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size
