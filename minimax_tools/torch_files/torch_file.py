"""Values of a file that torch.save wrote, read without running anything in it.

Both layouts are read: the zip archive, and the older stream of pickles with the storages after them. `inert` reads the
pickles, and `rebuild` has the names that become values. A storage is read only when a tensor is wanted.
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

_ZIP_MAGIC = b"PK\x03\x04"
_STREAM_MAGIC = 0x1950A86A20F9469CFC6C
_POINTER_MAGIC = b"version https://git-lfs"
# Header of a zip record: it begins with the mark and ends with the lengths of name and extra field.
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
        layout = _open(file)
        return layout.load(_TensorMaker(file, layout).make)


def read_structure(path: Path) -> Any:
    """Read the saved value with every tensor as its `StoredTensor`; no storage is read.

    Raises:
        OSError, ValueError, and others: See `refusing`.
    """
    with path.open("rb") as file:
        return _open(file).load(lambda stored: stored)


@contextlib.contextmanager
def refusing(path: Path, error_type: type[CannotRunError], *, next_step: str) -> Iterator[None]:
    """Translate the errors of a missing, damaged or foreign file in the block into one that names it.

    Raises:
        CannotRunError: The file is missing or cannot be read; the class is `error_type`. `next_step` is for a
            damaged file.
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


def _open(file: io.BufferedReader) -> _ZipArchive | _PickleStream:
    magic = file.read(len(_POINTER_MAGIC))
    if magic == _POINTER_MAGIC:
        raise ValueError("it is a Git LFS pointer: the file itself was never fetched")
    file.seek(0)
    return _ZipArchive(file) if magic.startswith(_ZIP_MAGIC) else _PickleStream(file)


class _ZipArchive:
    """A zip of uncompressed records: data.pkl, and the storages as data/<key>."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        with zipfile.ZipFile(file) as archive:
            self._records = {record.filename: record for record in archive.infolist()}
        pickles = [name for name in self._records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError(f"the archive holds {len(pickles)} files data.pkl, not one")
        self._folder = pickles[0].removesuffix("data.pkl")
        self._storages: dict[str, Storage] = {}
        # Overlapping records could need more memory than the file has.
        if sum(record.file_size for record in self._records.values()) > _size_bytes(file):
            raise ValueError("the archive's records are larger than the archive")

    def load(self, make_tensor: Callable[[StoredTensor], Any]) -> Any:
        if self._folder + "byteorder" in self._records and self._bytes("byteorder") != b"little":
            raise ValueError("the storages are not little-endian")
        return load_inert(io.BytesIO(self._bytes("data.pkl")), torch_vocabulary(self.storage, make_tensor))

    def storage(self, storage_id: StorageId) -> Storage:
        """Return the place of the whole storage, also for a window of it."""
        key = storage_id.key
        if key not in self._storages:
            self._storages[key] = self._place(f"data/{key}", key, storage_id.dtype)
        found = self._storages[key]
        if found.size_bytes != storage_id.size_bytes:
            raise ValueError(
                f"storage {key} has {found.size_bytes} bytes, the pickle says {storage_id.size_bytes}"
            )
        return replace(found, dtype=storage_id.dtype)

    def whole(self, key: str) -> Storage:
        """Return the place of a whole storage by its key."""
        return self._storages[key]

    def _bytes(self, name: str) -> bytes:
        return _read_storage(self._file, self._place(name, name, torch.uint8)).numpy().tobytes()

    def _place(self, name: str, key: str, dtype: torch.dtype) -> Storage:
        record = self._records.get(self._folder + name)
        if record is None:
            raise ValueError(f"the archive holds no {name}")
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise ValueError(f"{name} is compressed, which torch.save never does")
        # Past the file's buffer, which would read far more than these few bytes.
        header = os.pread(self._file.fileno(), _LOCAL_HEADER.size, record.header_offset)
        if len(header) != _LOCAL_HEADER.size:
            raise EOFError("the file ends too early")
        mark, *lengths = _LOCAL_HEADER.unpack(header)
        if mark != _ZIP_MAGIC:
            raise ValueError(f"{name} does not lie where the archive says")
        offset = record.header_offset + _LOCAL_HEADER.size + sum(lengths)
        _check_inside(self._file, offset, record.file_size)
        # torch writes zero when it leaves the checksum out.
        return Storage(
            key=key, dtype=dtype, offset=offset, size_bytes=record.file_size, crc32=record.CRC or None
        )


class _PickleStream:
    """The layout before torch 1.6: five pickles (mark, version, system, value, keys), then the storages."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._ids: dict[str, StorageId] = {}
        self._storages: dict[str, Storage] = {}

    def load(self, make_tensor: Callable[[StoredTensor], Any]) -> Any:
        names_only = Vocabulary(persistent_load=self._note_storage)
        if load_inert(self._file, names_only) != _STREAM_MAGIC:
            raise ValueError("the file does not begin with torch.save's mark")
        for _ in ("version", "system"):
            load_inert(self._file, names_only)
        start = self._file.tell()
        # Read twice: the storages come after the value, and a tensor needs its storage's place.
        load_inert(self._file, names_only)
        self._find_storages(load_inert(self._file, names_only))
        self._file.seek(start)
        return load_inert(self._file, torch_vocabulary(self.storage, make_tensor))

    def storage(self, storage_id: StorageId) -> Storage:
        """Return the place of the whole storage, also for a window of it."""
        return replace(self._storages[storage_id.key], dtype=storage_id.dtype)

    def whole(self, key: str) -> Storage:
        """Return the place of a whole storage by its key."""
        return self._storages[key]

    def _note_storage(self, persistent_id: Any) -> None:
        found = parse_storage_id(persistent_id)
        if found is not None and self._ids.setdefault(found.key, found).size_bytes != found.size_bytes:
            raise ValueError(f"storage {found.key} has two sizes")

    def _find_storages(self, keys: Any) -> None:
        if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(self._ids):
            raise ValueError("the storages are not those that the value names")
        position = self._file.tell()
        for key in map(str, keys):
            found = self._ids[key]
            prefix = os.pread(self._file.fileno(), _NUM_ELEMENTS.size, position)
            if len(prefix) != _NUM_ELEMENTS.size:
                raise EOFError("the file ends too early")
            (num_elements,) = _NUM_ELEMENTS.unpack(prefix)
            if num_elements != found.num_elements:
                raise ValueError(f"storage {key} has {num_elements} elements, not {found.num_elements}")
            position += _NUM_ELEMENTS.size
            _check_inside(self._file, position, found.size_bytes)
            self._storages[key] = Storage(
                key=key, dtype=found.dtype, offset=position, size_bytes=found.size_bytes
            )
            position += found.size_bytes


class _TensorMaker:
    """Maker of tensors from an open file; tensors that shared a storage share it again."""

    def __init__(self, file: io.BufferedReader, layout: _ZipArchive | _PickleStream) -> None:
        self._file = file
        self._layout = layout
        self._contents: dict[str, torch.Tensor] = {}

    def make(self, stored: StoredTensor) -> torch.Tensor:
        whole = self._layout.whole(stored.storage.key)
        if whole.key not in self._contents:
            self._contents[whole.key] = _read_storage(self._file, whole)
        content = self._contents[whole.key]
        return stored.view(content.narrow(0, stored.offset - whole.offset, stored.extent_bytes))


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


def _check_inside(file: io.BufferedReader, offset: int, size_bytes: int) -> None:
    if not 0 <= size_bytes <= _size_bytes(file) - offset:
        raise EOFError("the file ends in the middle of a storage")


def _size_bytes(file: io.BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size
