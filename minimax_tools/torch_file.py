"""Files of torch.save, mapped into memory by torch's restricted loader; nothing that a file names is called.

`torch.load(weights_only=True)` knows the names of tensors and plain containers. Each other name that a file holds is
given a class of its own that only keeps what the file says: an `InertRecord`. Names that a port or a library has marked
as safe count for nothing here. The tensors are views of the mapped file, so nothing of them is read until it is used.

Read are zip archives of pickle protocol 2, which torch writes since 1.6 unless told otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import pickle
import re
import struct
import threading
import warnings
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import serialization

from minimax_tools.errors import CannotRunError, Mm2Error

# First bytes of a zip archive, and of the text that Git LFS puts in a file's place.
_ZIP_MAGIC = b"PK\x03\x04"
_POINTER_MAGIC = b"version https://git-lfs"
# Lengths of the name and the extra field in the header of a zip record, which follow it.
_LENGTHS = struct.Struct("<26xHH")
# First bytes of a pickle of protocol 2, the only one that torch's restricted loader reads.
_PROTOCOL_2 = b"\x80\x02"
# Number of storages, from either end of the mapping, by which its place is found.
_NUM_ENDS = 500
# Part of a module's pickled state.
_PARAMETERS = "_parameters"
# The names that count as safe belong to the whole process.
_SAFE_NAMES_LOCK = threading.Lock()


class InertRecord:
    """An object of an unknown class, or the value of an unknown call, as the file describes it."""

    kind: ClassVar[str] = ""  # module and name of the class or function
    args: tuple[Any, ...]  # arguments of the call
    state: Any  # state that the file gives the object, as attributes for example
    pairs: list[tuple[Any, Any]]  # keys and values that the file puts into it

    def __new__(cls, *args: Any) -> InertRecord:
        """Keep the arguments of a call."""
        record = super().__new__(cls)
        record.args, record.state, record.pairs = args, None, []
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))

    def __repr__(self) -> str:
        return f"<inert {self.kind}>"


class TorchFile:
    """A file of torch.save, mapped.

    Raises:
        Exception: The file is missing, damaged or foreign; see `refusing`.
    """

    def __init__(self, path: Path) -> None:
        self.size_bytes = path.stat().st_size
        self._records = _read_directory(path)
        self._verified: set[int] = set()
        # The saved value: mapped CPU tensors, containers, numbers, numpy arrays and `InertRecord`s.
        self.value = _load(path)

    def find_storage(self, tensor: torch.Tensor) -> tuple[int, zipfile.ZipInfo] | None:
        """Return the offset in the file of a tensor's storage, and its record; None if it lies in the pickle.

        Raises:
            ValueError: The storage is no record of the file.
        """
        storage = tensor.untyped_storage()
        offset = storage.data_ptr() - self._address
        record = self._records.get(offset)
        if record is None:
            return None
        if record.file_size != storage.nbytes():
            raise ValueError(
                f"{record.filename} has {record.file_size} bytes, the pickle says {storage.nbytes()}"
            )
        return offset, record

    @functools.cached_property
    def _address(self) -> int:
        """Find the address of the file's first byte, which torch does not tell; 0 if no tensor is mapped.

        A mapping begins with a page of memory, and nearly all storages of a file are its records. Others lie in memory
        that torch allocated, by chance at the place of a record in its page: these alone can be resized.
        """
        offsets = defaultdict(list)
        for offset, record in self._records.items():
            if "/data/" in record.filename:
                offsets[offset % mmap.PAGESIZE].append(offset)
        sizes = {
            storage.data_ptr(): storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in _find_tensors(self.value))
            if not storage.resizable()
        }
        votes: Counter[int] = Counter()
        places = sorted(sizes)
        # The outermost tell it: those between them would fit if all lay a page further too.
        for address in {*places[:_NUM_ENDS], *places[-_NUM_ENDS:]}:
            for offset in offsets[address % mmap.PAGESIZE]:
                # A record of another size may be what is wrong with a file.
                votes[address - offset] += 2 if self._records[offset].file_size == sizes[address] else 1
        best = votes.most_common(2)
        if len(best) > 1 and best[0][1] == best[1][1]:
            raise ValueError("its tensors fit its records in more than one way")
        return best[0][0] if best else 0

    def verify(self, tensor: torch.Tensor) -> None:
        """Check the storage of a tensor of `value` by the file's checksum, once; this reads the storage.

        Raises:
            ValueError: It is damaged.
        """
        place = self.find_storage(tensor) if tensor.untyped_storage().nbytes() else None
        if place is None or place[0] in self._verified:
            return
        offset, record = place
        _check_content(record, storage_of(tensor).numpy().data)
        self._verified.add(offset)


def checksum(content: torch.Tensor) -> int:
    """Compute the CRC-32 of the bytes of a contiguous tensor."""
    return zlib.crc32(content.view(-1).view(torch.uint8).numpy().data)


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor, as uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def is_plain(tensor: torch.Tensor) -> bool:
    """Decide whether a tensor has its elements in memory: it is neither sparse, nested, quantised nor without data."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_dense and tensor.device.type == "cpu"


def without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, without gradient and of no class of its own; a parameter has both."""
    return tensor.detach().as_subclass(torch.Tensor)


def word_kind(value: Any) -> str:
    """Name the kind of a value of a file, as "list of length 3".

    Its content is not shown: lists that hold each other have texts without end, and deep ones end in a RecursionError.
    """
    if isinstance(value, InertRecord):
        return f"object of {value.kind}"
    kind = type(value).__name__
    return (
        f"{kind} of length {len(value)}" if isinstance(value, list | tuple | set | frozenset | dict) else kind
    )


def find_pickled_module(path: Path) -> str | None:
    """Return the class of the module that a file holds pickled; None if it holds none, or is no file of torch.save."""
    try:
        with refusing(path, CannotRunError, next_step=""):
            value = TorchFile(path).value
    except CannotRunError:
        return None
    is_module = (
        isinstance(value, InertRecord) and isinstance(value.state, dict) and _PARAMETERS in value.state
    )
    return value.kind if is_module else None


@contextlib.contextmanager
def refusing(path: Path, error_type: type[CannotRunError], *, next_step: str) -> Iterator[None]:
    """Translate errors in the block, which reads a file, into an `error_type` that names the file.

    Raises:
        CannotRunError: The file is missing, or it is damaged or foreign; for the latter `next_step` is given.
    """
    try:
        yield
    except Mm2Error:
        raise
    except OSError as error:
        raise error_type(
            f"cannot read {path}",
            found=error.strerror or str(error),
            next_step="Check the path, or copy the file again.",
        ) from error
    except Exception as error:  # torch raises anything on senseless bytes
        raise error_type(
            f"{path} is damaged, or torch.save did not write it",
            found=f"{type(error).__name__}: {_reason(error)}",
            next_step=next_step,
        ) from error


def _reason(error: Exception) -> str:
    """Return an error's text without the advice of torch, which is to load the file unsafely."""
    paragraphs = str(error).strip().split("\n\n")
    return paragraphs[-2 if len(paragraphs) > 2 else 0].strip().rstrip(".")


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a saved value, whose containers may hold each other."""
    seen: set[int] = set()
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            if is_plain(item):
                yield item
        elif isinstance(item, InertRecord | dict | list | tuple | set | frozenset) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, InertRecord):
                left += (item.args, item.state, item.pairs)
            else:
                left += item.values() if isinstance(item, dict) else item


def _read_directory(path: Path) -> dict[int, zipfile.ZipInfo]:
    """Return the records of an archive by the offset of their content; check what torch does not.

    Raises:
        OSError, ValueError, zipfile.BadZipFile: The file is missing, damaged, or not as torch writes it today.
    """
    with path.open("rb", buffering=0) as file:
        magic = file.read(len(_POINTER_MAGIC))
        if magic == _POINTER_MAGIC:
            raise ValueError("it is a Git LFS pointer: the file itself was never fetched")
        if not magic.startswith(_ZIP_MAGIC):
            raise ValueError(
                "it is no zip archive; if torch before 1.6 wrote it, load and save it with a newer one"
            )
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
        return {_check_record(file.fileno(), record): record for record in records}


def _check_record(file: int, record: zipfile.ZipInfo) -> int:
    """Check a record; return the offset of its content."""
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise ValueError(f"{record.filename} is compressed, which torch.save never does")
    lengths = os.pread(file, _LENGTHS.size, record.header_offset)
    offset: int = record.header_offset + _LENGTHS.size + sum(_LENGTHS.unpack(lengths))
    name = record.filename.partition("/")[2]
    if name == "byteorder" and os.pread(file, record.file_size, offset) != b"little":
        raise ValueError("the storages are not little-endian")
    if name == "data.pkl":
        content = os.pread(file, record.file_size, offset)
        _check_content(record, content)
        if not content.startswith(_PROTOCOL_2):
            raise ValueError("its pickle is not of protocol 2, which torch.save writes by default")
    return offset


def _check_content(record: zipfile.ZipInfo, content: bytes | memoryview) -> None:
    # torch writes zero when it leaves the checksum out.
    if record.CRC and zlib.crc32(content) != record.CRC:
        raise ValueError(f"{record.filename} does not match its checksum")


def _load(path: Path) -> Any:
    with _SAFE_NAMES_LOCK, warnings.catch_warnings():
        # torch warns of what its errors say too.
        warnings.simplefilter("ignore")
        marked_by_others = serialization.get_safe_globals()
        serialization.clear_safe_globals()
        try:
            return _load_mapped(path)
        except pickle.UnpicklingError:
            # Most files hold known names alone: only others are read for their names first.
            names = serialization.get_unsafe_globals_in_checkpoint(path)
            serialization.add_safe_globals([(_stand_in(name), name) for name in names])
            return _load_mapped(path)
        finally:
            serialization.clear_safe_globals()
            serialization.add_safe_globals(marked_by_others)


def _load_mapped(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _stand_in(name: str) -> Callable[..., Any]:
    """Return what is called in place of a name in a file."""
    return _BUILDERS.get(name) or type("InertRecord", (InertRecord,), {"kind": name})


class _Array(np.ndarray[Any, Any]):
    """A numpy array of numbers; numpy's own would take any memory layout from a file."""

    def __new__(cls, *_: Any) -> _Array:
        array: _Array = super().__new__(cls, (0,))
        return array

    def __setstate__(self, state: Any) -> None:
        if self.size:
            # A tensor may lie in this memory already.
            raise ValueError("it fills a numpy array twice")
        _version, shape, dtype_record, is_fortran, content = state
        dtype = _numpy_dtype(dtype_record)
        # In the machine's byte order, which torch needs.
        numbers = np.frombuffer(content, dtype).astype(dtype.newbyteorder("="))
        native = 1, tuple(shape), numbers.dtype, bool(is_fortran), numbers.tobytes()
        super().__setstate__(native)  # type: ignore[arg-type]  # typeshed wants a numpy.bool, numpy refuses it


def _numpy_scalar(dtype_record: Any, content: bytes) -> Any:
    return np.frombuffer(content, _numpy_dtype(dtype_record), count=1)[0].item()


def _numpy_dtype(record: Any) -> np.dtype[Any]:
    """Return the dtype of plain numbers that an inert `numpy.dtype` describes; raise ValueError for another."""
    is_dtype = isinstance(record, InertRecord) and record.kind == "numpy.dtype" and bool(record.args)
    code = record.args[0] if is_dtype else None
    if not isinstance(code, str) or re.fullmatch(r"b1|[iu][1248]|f[248]|c(8|16)", code) is None:
        raise ValueError("it holds a numpy array that is not of numbers")
    # The state is (version, byte order, …); `|` is for single bytes.
    order = record.state[1] if isinstance(record.state, tuple) and len(record.state) > 1 else "|"
    if order not in ("<", ">", "|"):
        raise ValueError("it holds a numpy array of an unknown byte order")
    return np.dtype(f"{order}{code}")


# Names that become values, besides those that torch knows. A class of torch or numpy is never called itself.
_BUILDERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        # The factory is not called: missing keys stay missing.
        "collections.defaultdict": lambda *_: {},
        "builtins.frozenset": frozenset,
        # Protocol 2 writes empty bytes as a call without arguments.
        "builtins.bytes": lambda: b"",
        **{f"numpy.{core}.multiarray.scalar": _numpy_scalar for core in ("core", "_core")},
        **{f"numpy.{core}.multiarray._reconstruct": _Array for core in ("core", "_core")},
    }
)
