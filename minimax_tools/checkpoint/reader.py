"""Tensors of a checkpoint folder, read exactly, one at a time, without mapping files; and fast transposed copies.

Kernels that take expert weights as [in, out] hold them transposed to the checkpoint. A plain copy to a transposed
view jumps by whole rows, which lie a multiple of a page apart and fall into the same few cache lines.
R rows, C columns.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import WEIGHT_DTYPES, TensorIndex, find_scale
from minimax_tools.checkpoint.pickled import PickledEntry
from minimax_tools.checkpoint.shard_files import ALIGNMENT, ShardFiles
from minimax_tools.errors import CheckpointError
from minimax_tools.model.quantisation import BLOCK_SIZE
from minimax_tools.stored_dtype import FLOAT8_E4M3FN
from minimax_tools.torch_file import checksum, refusing, storage_of

# Limits of the rows copied at a time, in rows and in bytes: they stay in a core's second-level cache.
_NUM_ROWS = 512
_CACHE_BYTES = 3 << 20
# Gap between the buffer's rows, one cache line: the values of a column then fall into different lines.
_GAP_BYTES = 64


def is_transposed(matrix: torch.Tensor) -> bool:
    """Decide whether a matrix is a view [R,C] whose columns, not rows, are contiguous."""
    return matrix.dim() == 2 and matrix.stride(0) == 1 and matrix.stride(1) > 1 and matrix.shape[1] > 1


def copy_matrix(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy `source` to `out` of the same shape, cast to its dtype; bit for bit `out.copy_(source)`.

    If `out` is a transposed view in host memory, rows go through a buffer with gaps, in a quarter of the time.
    """
    is_in_host_memory = source.device.type == out.device.type == "cpu"
    if not is_in_host_memory or source.shape != out.shape or not is_transposed(out):
        out.copy_(source)
        return
    num_rows, num_columns = out.shape
    step = max(1, min(_NUM_ROWS, num_rows, _CACHE_BYTES // (num_columns * out.itemsize)))
    buffer = torch.empty(step, num_columns + _GAP_BYTES // out.itemsize, dtype=out.dtype)[:, :num_columns]
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        buffered_rows = buffer[: rows.stop - rows.start]
        buffered_rows.copy_(source[rows])
        out[rows].copy_(buffered_rows)


class CheckpointReader:
    """Reads single tensors of a checkpoint folder, or of an `index`; safe to use from several threads.

    | to get | call |
    |---|---|
    | the stored bytes as a tensor | `read(name)`, `read_into(name, out)` |
    | a weight's values, FP8 times its scales | `read_weight(name, dtype)`, `read_weight_into(name, out)` |
    | the values of some of its rows | `read_weight_into(name, out, rows=rows)` |

    Opened shards stay open until `close`, or the end of a `with` block. FP8 codes, and matrices to be transposed, pass
    through buffers that each thread keeps: fresh memory for every matrix would cost more than the arithmetic.
    Of a `.bin` file a tensor that fills its storage is checked by the file's checksum when it is read whole.
    `index` and `layers` are as in `TensorIndex.from_folder`.

    Raises:
        CheckpointError: The folder's shards have faults.
    """

    def __init__(
        self, folder: Path | str, *, index: TensorIndex | None = None, layers: range | None = None
    ) -> None:
        self.index = TensorIndex.from_folder(Path(folder), layers=layers) if index is None else index
        self._files = ShardFiles()
        self._is_past_cache = False
        # Memory that each thread keeps, by use.
        self._buffers = threading.local()
        self._totals = _Totals()

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors read so far, headers aside."""
        return self._totals.num_bytes

    @property
    def reading_s(self) -> float:
        """Seconds spent so far on reading bytes, summed over all threads."""
        return self._totals.reading_s

    @property
    def converting_s(self) -> float:
        """Seconds spent so far on converting weights, the reading of their bytes included, summed over all threads."""
        return self._totals.converting_s

    @property
    def folder(self) -> Path:
        """The checkpoint folder."""
        return self.index.folder

    def past_cache(self) -> CheckpointReader:
        """Return a second reader for tensors that are needed once: of them, only small ones enter the page cache.

        Both share files, buffers and totals; close the original only.
        """
        reader = copy.copy(self)
        reader._is_past_cache = True
        return reader

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor into fresh CPU memory, in its stored dtype; raise CheckpointError if it cannot be read.

        An expanded tensor of a `.bin` file, which repeats its elements, stays a view: so a small file cannot demand
        much memory.
        """
        entry = self.index[name]
        if isinstance(entry, PickledEntry) and entry.repeats_elements:
            return entry.tensor
        return self._read(entry)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, a contiguous CPU tensor of the stored shape and dtype, with a tensor's stored bytes.

        Raises:
            CheckpointError: As for `read`.
            ValueError: `out` is not such a tensor.
        """
        entry = self.index[name]
        _check_out(name, entry.shape, out)
        if out.dtype != entry.dtype.as_torch() or not _is_fillable(out):
            raise ValueError(f"{name} is {entry.dtype}: out must be the same, contiguous and on the CPU")
        self._fill(entry, out)

    def read_weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a weight's values into fresh CPU memory in `dtype`: FP8 times its scales in float32, rounded once.

        Raises:
            CheckpointError: As for `read`. Or the scales of an FP8 weight are missing or do not fit. Or the stored
                dtype holds no weight.
        """
        out = torch.empty(self.index[name].shape, dtype=dtype)
        self.read_weight_into(name, out)
        return out

    def read_weight_into(
        self, name: str, out: torch.Tensor, *, rows: range | None = None, columns: range | None = None
    ) -> None:
        """Fill `out` with a weight's values (see `read_weight`), or with those of some neighbouring rows and columns.

        Other rows are not read, except those of an FP8 weight that share a scale with them. `out` has any float dtype
        and device, and the shape of the values; it may be a transposed view.

        Raises:
            CheckpointError: As for `read_weight`.
            ValueError: There are no such rows or columns, or `out` has another shape.
        """
        entry = self.index[name]
        row_entry = entry if rows is None else _rows_of(entry, rows)
        shape = row_entry.shape
        if columns is not None:
            check_range(columns, entry.shape[1], name=name, unit="columns")
            shape = (shape[0], len(columns))
        _check_out(name, shape, out)
        _check_weight(entry)
        with self._writing_values(shape, out) as values:
            if entry.dtype == FLOAT8_E4M3FN:
                self._dequantise_into(entry, values, rows, columns)
            elif columns is None:
                self._fill_weight(row_entry, values)
            else:
                whole_rows = self._buffer("rows", row_entry.shape, row_entry.dtype.as_torch())
                self._fill(row_entry, whole_rows)
                values.copy_(whole_rows[:, columns.start : columns.stop])

    def close(self) -> None:
        """Close every open shard; further reads open them again."""
        self._files.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        out = torch.empty(entry.shape, dtype=entry.dtype.as_torch())
        self._fill(entry, out)
        return out

    @contextmanager
    def _writing_values(self, shape: tuple[int, ...], out: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield `out`, or for a transposed `out` a buffer that is copied to it after the block; count the time."""
        started = time.perf_counter()
        values = self._buffer("values", shape, out.dtype) if is_transposed(out) else out
        yield values
        if values is not out:
            copy_matrix(values, out)
        self._totals.add(converting_s=time.perf_counter() - started)

    def _fill_weight(self, entry: TensorEntry, out: torch.Tensor) -> None:
        if entry.dtype.as_torch() == out.dtype and _is_fillable(out):
            self._fill(entry, out)
        else:
            out.copy_(self._read(entry))

    def _dequantise_into(
        self, entry: TensorEntry, out: torch.Tensor, rows: range | None, columns: range | None
    ) -> None:
        """Fill `out` with rows and columns of an FP8 weight; None for all.

        Whole blocks of 128 × 128 are dequantised: `block_rows` and `block_columns` hold `rows` and `columns`, and more.
        The values asked for are copied out of them.
        """
        # Exact: BF16 scales are float32 numbers too.
        scale_inv = self._read(find_scale(self.index, entry)).float()
        if not out.numel():
            return
        num_rows, num_columns = entry.shape
        rows = range(num_rows) if rows is None else rows
        columns = range(num_columns) if columns is None else columns
        row_blocks, block_rows = _blocks_of(rows, num_rows)
        column_blocks, block_columns = _blocks_of(columns, num_columns)
        block_entry = _rows_of(entry, block_rows)
        codes = self._buffer(
            "codes", block_entry.shape, block_entry.dtype.as_torch(), offset=block_entry.offset
        )
        self._fill(block_entry, codes)
        is_direct = (block_rows, block_columns) == (rows, columns) and out.device.type == "cpu"
        values = dequantise(
            codes[:, block_columns.start : block_columns.stop].contiguous(),
            scale_inv[row_blocks, column_blocks],
            out=out if is_direct else None,
            dtype=out.dtype,
        )
        if not is_direct:
            first_row, first_column = rows.start - block_rows.start, columns.start - block_columns.start
            out.copy_(values[first_row:, first_column:][: len(rows), : len(columns)])

    def _buffer(
        self, use: str, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0
    ) -> torch.Tensor:
        """Return this thread's buffer for a use as a tensor; its content is undefined.

        It lies in its page as bytes at `offset` lie in that of their file, so that these can be read without a copy.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer: torch.Tensor | None = getattr(self._buffers, use, None)
        if buffer is None or buffer.numel() < num_bytes + ALIGNMENT:
            buffer = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
            setattr(self._buffers, use, buffer)
        start = (offset - buffer.data_ptr()) % ALIGNMENT
        return buffer[start : start + num_bytes].view(dtype).view(shape)

    def _fill(self, entry: TensorEntry, out: torch.Tensor) -> None:
        """Fill `out`, of the entry's shape and dtype, with the stored values."""
        if isinstance(entry, PickledEntry):
            self._fill_pickled(entry, out)
        else:
            self._fill_bytes(entry, out)

    def _fill_pickled(self, entry: PickledEntry, out: torch.Tensor) -> None:
        if entry.is_verbatim:
            self._fill_bytes(entry, out)
            content = out
        else:
            self._copy_mapped(entry, out)
            content = storage_of(entry.tensor)
        if entry.crc32 is not None and checksum(content) != entry.crc32:
            raise CheckpointError(
                f"{entry.name} in {entry.file} is damaged",
                expected=f"checksum {entry.crc32:08x}",
                found="another one",
                next_step="Fetch the file again.",
            )

    def _copy_mapped(self, entry: PickledEntry, out: torch.Tensor) -> None:
        started = time.perf_counter()
        # Memory of a file that became shorter cannot be read: the process would be stopped.
        if not entry.file.is_file() or entry.file.stat().st_size < entry.file_size_bytes:
            raise _unreadable(entry, "the file became shorter")
        # A damaged file may describe a tensor whose values torch refuses to compute.
        with refusing(entry.file, CheckpointError, next_step="Fetch the file again."):
            out.copy_(entry.tensor)
        self._totals.add(num_bytes=entry.size_bytes, reading_s=time.perf_counter() - started)

    def _fill_bytes(self, entry: TensorEntry, out: torch.Tensor) -> None:
        if entry.size_bytes == 0:
            return
        out_bytes = out.view(-1).view(torch.uint8)
        started = time.perf_counter()
        try:
            count = self._files.read_into(entry.file, entry.offset, out_bytes, past_cache=self._is_past_cache)
        except OSError as error:
            raise _unreadable(entry, str(error)) from error
        if count < entry.size_bytes:
            raise _unreadable(entry, f"the file ends after {count} of {entry.size_bytes} bytes")
        self._totals.add(num_bytes=count, reading_s=time.perf_counter() - started)


class _Totals:
    """Sums over all threads."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.reading_s = self.converting_s = 0.0
        self._lock = threading.Lock()

    def add(self, *, num_bytes: int = 0, reading_s: float = 0.0, converting_s: float = 0.0) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self.reading_s += reading_s
            self.converting_s += converting_s


def _rows_of(entry: TensorEntry, rows: range) -> TensorEntry:
    """Return neighbouring rows of a stored tensor as an entry; raise ValueError if it has no such rows."""
    check_range(rows, entry.shape[0], name=entry.name, unit="rows")
    return entry.narrow_rows(rows.start, len(rows))


def check_range(indices: range, size: int, *, name: str, unit: str) -> None:
    """Raise ValueError unless these are neighbouring `unit` (rows or columns) of a tensor that has `size` of them."""
    if indices.step != 1 or not 0 <= indices.start <= indices.stop <= size:
        raise ValueError(f"{name} has {size} {unit}, not {indices}")


def _blocks_of(indices: range, size: int) -> tuple[slice, range]:
    """Find the blocks that hold indices of an FP8 weight's dim; return the blocks, and all indices in them."""
    start, stop = indices.start // BLOCK_SIZE, math.ceil(indices.stop / BLOCK_SIZE)
    # The weight's last block may be ragged.
    return slice(start, stop), range(start * BLOCK_SIZE, min(stop * BLOCK_SIZE, size))


def _check_weight(entry: TensorEntry) -> None:
    if entry.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"{entry.name} in {entry.file} is no weight that mm2 can read",
            expected="one of " + ", ".join(str(dtype) for dtype in WEIGHT_DTYPES),
            found=str(entry.dtype),
            next_step="Use the FP8 repository of the hub, or a BF16 copy of it.",
        )


def _is_fillable(out: torch.Tensor) -> bool:
    return out.is_contiguous() and out.device.type == "cpu"


def _check_out(name: str, shape: tuple[int, ...], out: torch.Tensor) -> None:
    if tuple(out.shape) != shape:
        raise ValueError(f"{name} has shape {list(shape)}, out has {list(out.shape)}")


def _unreadable(entry: TensorEntry, found: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.name} cannot be read from {entry.file}",
        expected=f"{entry.size_bytes} bytes at {entry.offset}",
        found=found,
        next_step="Fetch the file again.",
    )
