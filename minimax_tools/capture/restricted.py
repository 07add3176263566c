"""Restricted loading: reads what torch.save wrote, without torch's loader and without running anything in it.

Both layouts are read: the zip archive of today, and the older stream of pickles with the storages behind
them. The pickles go through `inert`, the names that become values are those of `rebuild`, and a storage is
read once, straight into the tensor that keeps it. So memory stays at one file's size.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from minimax_tools.capture.inert import Vocabulary, load_inert
from minimax_tools.capture.rebuild import Storage, StorageId, parse_storage_id, torch_vocabulary
from minimax_tools.errors import CaptureError

_ZIP_MAGIC = b"PK\x03\x04"
_STREAM_MAGIC = 0x1950A86A20F9469CFC6C
# A zip record's own header: it begins with the mark and ends with the lengths of its name and extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")

# What malformed bytes can raise on their way through zipfile, pickletools, struct and torch.
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


def load_restricted(path: Path) -> Any:
    """What torch.save wrote to `path`: CPU tensors, containers and numbers; the rest as `InertRecord`s.

    Raises:
        CaptureError: The file is missing, cut short, damaged, or not one of torch.save's.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
            file.seek(0)
            return _ZipArchive(file).load() if is_zip else _PickleStream(file).load()
    except OSError as error:
        raise CaptureError(
            f"cannot read {path}",
            found=error.strerror or str(error),
            next_step="Check the path, or copy the file again.",
        ) from error
    except _FAULTS as error:
        raise CaptureError(
            f"{path} is damaged, or torch.save did not write it",
            found=f"{type(error).__name__}: {error}",
            next_step="Copy it again from the host that wrote it, or run the capture again.",
        ) from error


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
        self._storages: dict[str, torch.Tensor] = {}
        # Records that overlap would take more memory than the file.
        if sum(record.file_size for record in self._records.values()) > _size_bytes(file):
            raise ValueError("the archive's records are larger than the archive")

    def load(self) -> Any:
        if self._folder + "byteorder" in self._records and self._bytes("byteorder") != b"little":
            raise ValueError("the storages are not little-endian")
        return load_inert(io.BytesIO(self._bytes("data.pkl")), torch_vocabulary(self._read_storage))

    def _read_storage(self, storage_id: StorageId) -> Storage:
        key = storage_id.key
        if key not in self._storages:
            self._storages[key] = self._read(f"data/{key}")
        data = self._storages[key]
        if data.numel() != storage_id.size_bytes:
            raise ValueError(
                f"storage {key} has {data.numel()} bytes, the pickle says {storage_id.size_bytes}"
            )
        return storage_id.storage(data)

    def _bytes(self, name: str) -> bytes:
        return self._read(name).numpy().tobytes()

    def _read(self, name: str) -> torch.Tensor:
        """uint8 [bytes], the content of a record."""
        record = self._records.get(self._folder + name)
        if record is None:
            raise ValueError(f"the archive holds no {name}")
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise ValueError(f"{name} is compressed, which torch.save never does")
        self._file.seek(record.header_offset)
        mark, *lengths = _LOCAL_HEADER.unpack(_read_exactly(self._file, _LOCAL_HEADER.size))
        if mark != _ZIP_MAGIC:
            raise ValueError(f"{name} does not lie where the archive says")
        self._file.seek(sum(lengths), os.SEEK_CUR)
        content = _read_tensor(self._file, record.file_size)
        # Zero is what torch writes where it was told to leave the checksum out.
        if record.CRC and zlib.crc32(content.numpy().data) != record.CRC:
            raise ValueError(f"{name} does not match its checksum")
        return content


class _PickleStream:
    """The layout before torch 1.6: five pickles (mark, version, system, value, keys), then the storages."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._ids: dict[str, StorageId] = {}
        self._storages: dict[str, torch.Tensor] = {}

    def load(self) -> Any:
        names_only = Vocabulary(persistent_load=self._note_storage)
        if load_inert(self._file, names_only) != _STREAM_MAGIC:
            raise ValueError("the file does not begin with torch.save's mark")
        for _ in ("version", "system"):
            load_inert(self._file, names_only)
        start = self._file.tell()
        # Read twice: the storages lie behind the value, and a tensor needs its content when it is made.
        load_inert(self._file, names_only)
        self._read_storages(load_inert(self._file, names_only))
        self._file.seek(start)
        return load_inert(
            self._file, torch_vocabulary(lambda found: found.storage(self._storages[found.key]))
        )

    def _note_storage(self, persistent_id: Any) -> None:
        found = parse_storage_id(persistent_id)
        if found is not None and self._ids.setdefault(found.key, found).size_bytes != found.size_bytes:
            raise ValueError(f"storage {found.key} has two sizes")

    def _read_storages(self, keys: Any) -> None:
        if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(self._ids):
            raise ValueError("the storages are not those that the value names")
        for key in map(str, keys):
            found = self._ids[key]
            (num_elements,) = struct.unpack("<q", _read_exactly(self._file, 8))
            if num_elements != found.num_elements:
                raise ValueError(f"storage {key} has {num_elements} elements, not {found.num_elements}")
            self._storages[key] = _read_tensor(self._file, found.size_bytes)


def _read_tensor(file: io.BufferedReader, size_bytes: int) -> torch.Tensor:
    """uint8 [size_bytes], the next bytes of the file."""
    if not 0 <= size_bytes <= _size_bytes(file) - file.tell():
        raise EOFError("the file ends in the middle of a storage")
    content = torch.empty(size_bytes, dtype=torch.uint8)
    view = content.numpy().data
    position = 0
    while position < size_bytes:
        count = file.readinto(view[position:])
        if not count:
            raise EOFError("the file became shorter")
        position += count
    return content


def _read_exactly(file: io.BufferedReader, size_bytes: int) -> bytes:
    content = file.read(size_bytes)
    if len(content) != size_bytes:
        raise EOFError("the file ends too early")
    return content


def _size_bytes(file: io.BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size
