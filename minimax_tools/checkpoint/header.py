"""The header of a safetensors shard: eight bytes of length and a JSON table; the tensors' data follow without a gap."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.errors import CheckpointError, shorten
from minimax_tools.machine.json_file import parse_json
from minimax_tools.stored_dtype import SAFETENSORS_DTYPES, SAFETENSORS_NAMES

_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
_METADATA = "__metadata__"
Tensor = TypeVar("Tensor", bound=TensorSize)
# Alignment of the data in bytes: safetensors maps tensors in place.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry(TensorSize):
    """A stored tensor: `size_bytes` of data in `file`, from byte `offset` of the file on."""

    file: Path
    offset: int

    @property
    def is_pickled(self) -> bool:
        """True if the file is one that torch.save wrote."""
        return False

    @property
    def position(self) -> tuple[Path, int]:
        """Sort key: the order of tensors in their files."""
        return self.file, self.offset

    def narrow_rows(self, start: int, num_rows: int) -> TensorEntry:
        """Return neighbouring rows, indices of the first dim, as a stored tensor of their own."""
        row_bytes = self.size_bytes // max(self.shape[0], 1)
        return replace(self, shape=(num_rows, *self.shape[1:]), offset=self.offset + start * row_bytes)


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """Read a shard's tensors, in the order of their data; raise CheckpointError if header or size are damaged."""
    try:
        file_size_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            data_start = data_start_of(path, prefix, file_size_bytes=file_size_bytes)
            header_json = file.read(data_start - LENGTH_BYTES)
    except OSError as error:
        raise _damaged(path, str(error)) from error
    return parse_header(path, header_json, file_size_bytes=file_size_bytes)


def data_start_of(path: Path, prefix: bytes, *, file_size_bytes: int) -> int:
    """Compute the offset of a shard's data from `prefix`, its first `LENGTH_BYTES` bytes; the JSON lies between.

    A file too short for such a header is a CheckpointError.
    """
    if len(prefix) < LENGTH_BYTES:
        raise _damaged(path, f"{len(prefix)} bytes, too short for a header")
    (header_size_bytes,) = _LENGTH.unpack(prefix)
    if LENGTH_BYTES + header_size_bytes > file_size_bytes:
        raise _damaged(path, f"a header of {header_size_bytes} bytes in a file of {file_size_bytes}")
    return LENGTH_BYTES + int(header_size_bytes)


def parse_header(path: Path, header_json: bytes, *, file_size_bytes: int) -> tuple[TensorEntry, ...]:
    """Parse a header, given without the length before it, of a shard that need not be on this machine.

    A damaged header, or one that contradicts the file's size, is a CheckpointError.
    """
    data_start = LENGTH_BYTES + len(header_json)
    entries = _parse_entries(path, header_json, data_start)
    _check_layout(path, entries, data_start=data_start, file_size_bytes=file_size_bytes)
    return entries


def encode_header(tensors: Sequence[TensorSize], *, alignment: int = _ALIGNMENT) -> bytes:
    """Return the first bytes of a shard whose data are `tensors` in this order.

    Spaces pad the header, so that the data begin at a multiple of `alignment` bytes.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.size_bytes
        header[tensor.name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    header_json = json.dumps(header, separators=(",", ":")).encode()
    num_spaces = -(LENGTH_BYTES + len(header_json)) % alignment  # up to the next multiple
    header_json += b" " * num_spaces
    return _LENGTH.pack(len(header_json)) + header_json


def divide_into_shards(tensors: Iterable[Tensor], shard_size_bytes: int) -> list[tuple[Tensor, ...]]:
    """Divide tensors among shards in their order; a tensor larger than `shard_size_bytes` gets one of its own."""
    shards: list[list[Tensor]] = []
    filled_bytes = 0
    for tensor in tensors:
        if not shards or filled_bytes + tensor.size_bytes > shard_size_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(tensor)
        filled_bytes += tensor.size_bytes
    return [tuple(shard) for shard in shards]


def _parse_entries(path: Path, header_json: bytes, data_start: int) -> tuple[TensorEntry, ...]:
    try:
        header = parse_json(header_json)
    except ValueError as error:
        raise _damaged(path, f"a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "a header that is no JSON object")
    if not isinstance(header.get(_METADATA), dict | None):  # some tools write null
        raise _damaged(path, f"{_METADATA} that is no JSON object")
    entries = [
        _parse_entry(path, name, description, data_start)
        for name, description in header.items()
        if name != _METADATA
    ]
    # An empty tensor shares its offset with the next one, and comes first.
    return tuple(sorted(entries, key=lambda entry: (entry.offset, entry.size_bytes)))


def _parse_entry(path: Path, name: str, description: Any, data_start: int) -> TensorEntry:
    # By hand: a checkpoint has 200 000 tensors.
    match description:
        case {"dtype": str(dtype_name), "shape": list(sizes), "data_offsets": [begin, end]} if _are_integers(
            begin, end, *sizes
        ):
            shape = tuple(sizes)
        case _:
            found = shorten(json.dumps(description))
            raise _damaged(path, f"no dtype, shape and data_offsets for {shorten(name)}: {found}")
    if dtype_name not in SAFETENSORS_DTYPES:
        raise _damaged(path, f"dtype {shorten(dtype_name)} for {shorten(name)}")
    dtype = SAFETENSORS_DTYPES[dtype_name]
    entry = TensorEntry(name=name, file=path, dtype=dtype, shape=shape, offset=data_start + begin)
    if begin < 0 or end - begin != entry.size_bytes or any(size < 0 for size in shape):
        raise _damaged(path, f"offsets {begin} to {end} for {name}, which is {dtype_name} {list(shape)}")
    return entry


def _are_integers(*values: Any) -> bool:
    return all(type(value) is int for value in values)


def _check_layout(
    path: Path, entries: tuple[TensorEntry, ...], *, data_start: int, file_size_bytes: int
) -> None:
    """Check that the tensors fill the file from `data_start` to its end, without gap or overlap."""
    position = data_start
    for entry in entries:
        if entry.offset != position:
            raise _damaged(path, f"{entry.name} at byte {entry.offset}, where byte {position} was due")
        position += entry.size_bytes
    if position > file_size_bytes:
        raise _damaged(path, f"{file_size_bytes} bytes of {position}: the data is truncated")
    if position < file_size_bytes:
        raise _damaged(path, f"{file_size_bytes - position} bytes after the last tensor")


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged", found=found, next_step="Fetch the file again.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes `start` to `stop` of a file, the latter excluded."""

    file: Path
    start: int
    stop: int


def join_ranges(entries: Iterable[TensorEntry]) -> list[ByteRange]:
    """Return the byte ranges of tensors in the order given; one that begins where the last ended joins its range."""
    ranges: list[ByteRange] = []
    for entry in entries:
        start, stop = entry.offset, entry.offset + entry.size_bytes
        if ranges and (ranges[-1].file, ranges[-1].stop) == (entry.file, start):
            start = ranges.pop().start
        ranges.append(ByteRange(file=entry.file, start=start, stop=stop))
    return ranges
