"""CheckpointReader: tensors read byte-exactly from a checkpoint folder, one at a time, files not mapped."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from minimax_tools.checkpoint.fp8 import BLOCK_SIZE, dequantise, scale_shape
from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.shard_files import ShardFiles
from minimax_tools.checkpoint.transpose import copy_matrix, is_transposed
from minimax_tools.errors import CheckpointError
from minimax_tools.model.weight_names import scale_name

# What a weight may be stored as; other types hold codes whose meaning mm2 does not know.
WEIGHT_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)


class CheckpointReader:
    """Reads single tensors of a checkpoint folder; safe to use from several threads.

    | to get | call |
    |---|---|
    | the stored bytes as a tensor | `read(name)`, `read_into(name, out)` |
    | a weight's values, FP8 times its scales | `read_weight(name, dtype)`, `read_weight_into(name, out)` |
    | the values of some of its rows | `read_weight_rows_into(name, rows, out)` |

    Opened shards stay open until `close`, or the end of a `with` block. FP8 codes, and what is to be transposed, pass
    through buffers that each thread keeps: fresh memory for every matrix would cost more than the arithmetic.

    Args:
        folder: The checkpoint folder.
        index: Its index, where it was read already.
        layers: The decoder layers that will be read, where the folder may lack the shards of others (see
            `TensorIndex.from_folder`).

    Raises:
        CheckpointError: The folder's shards have faults (see `TensorIndex.from_folder`).
    """

    def __init__(
        self, folder: Path, *, index: TensorIndex | None = None, layers: range | None = None
    ) -> None:
        self.index = TensorIndex.from_folder(folder, layers=layers) if index is None else index
        self._files = ShardFiles()
        self._lock = threading.Lock()
        self._staging = threading.local()
        self._num_bytes_read = 0
        self._reading_s = self._converting_s = 0.0

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors read so far, headers aside."""
        return self._num_bytes_read

    @property
    def reading_s(self) -> float:
        """Seconds spent so far on reading bytes, of all threads together."""
        return self._reading_s

    @property
    def converting_s(self) -> float:
        """Seconds spent so far on getting weights, reading their bytes included, of all threads together."""
        return self._converting_s

    @property
    def folder(self) -> Path:
        """The checkpoint folder."""
        return self.index.folder

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in its stored dtype; only its own bytes are read, into fresh memory.

        Raises:
            CheckpointError: There is no such tensor, or its shard became shorter or unreadable.
        """
        return self._read(self.index[name], past_cache=False)

    def read_into(self, name: str, out: torch.Tensor, *, past_cache: bool = False) -> None:
        """Fill `out`, contiguous on the CPU and of the stored shape and dtype, with the tensor's bytes.

        Args:
            name: The tensor.
            out: Where its bytes go.
            past_cache: Whether to leave the page cache as it is (see `ShardFiles`): for what is read once.

        Raises:
            CheckpointError: As for `read`.
            ValueError: `out` is not such a tensor.
        """
        entry = self.index[name]
        _check_out(entry, out)
        if out.dtype != entry.dtype or not _is_fillable(out):
            raise ValueError(f"{name} is {entry.dtype}: out must be the same, contiguous and on the CPU")
        self._fill(entry, out, past_cache=past_cache)

    def read_weight(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor's values on the CPU in `dtype`: FP8 times its scales in float32, then rounded once.

        Raises:
            CheckpointError: As for `read`; or the scales of an FP8 weight are missing or do not fit it; or
                the tensor is stored in a dtype that holds no weight.
        """
        out = torch.empty(self.index[name].shape, dtype=dtype)
        self.read_weight_into(name, out)
        return out

    def read_weight_into(self, name: str, out: torch.Tensor, *, past_cache: bool = False) -> None:
        """Fill `out`, of the stored shape and any float dtype, with the tensor's values (see `read_weight`).

        `out` may be a transposed view of where the values go: then they are written as columns.

        Args:
            name: The tensor.
            out: Where its values go.
            past_cache: As for `read_into`.

        Raises:
            CheckpointError: As for `read_weight`.
            ValueError: `out` has another shape.
        """
        entry = self.index[name]
        _check_out(entry, out)
        _check_weight(entry)
        with self._converting():
            self._read_values(entry, out, past_cache=past_cache)

    def read_weight_rows_into(
        self, name: str, rows: range, out: torch.Tensor, *, columns: range | None = None
    ) -> None:
        """Fill `out` with the values of some rows of a weight, in any float dtype; other rows' bytes are not read.

        Of an FP8 weight the rows and columns that share a scale with them are read and weighed too.

        Args:
            name: The tensor.
            rows: Which, side by side.
            out: On the CPU, of the stored shape but for the number of rows and columns.
            columns: Which of their columns, side by side, of a matrix; None for all.

        Raises:
            CheckpointError: As for `read_weight`.
            ValueError: There are no such rows or columns, or `out` has another shape.
        """
        entry = self.index[name]
        part = _rows_of(entry, rows)
        if columns is not None:
            _check_range(columns, entry.shape[1], f"{name} has", "columns")
        shape = part.shape if columns is None else (len(rows), len(columns))
        if tuple(out.shape) != shape:
            raise ValueError(f"{name} has a part of {list(shape)}, out has {list(out.shape)}")
        _check_weight(entry)
        with self._converting():
            # Written as columns only once they are whole.
            values = self._staged("part", shape, out.dtype) if is_transposed(out) else out
            if entry.dtype == torch.float8_e4m3fn:
                self._dequantise_part_into(entry, rows, columns or range(entry.shape[1]), values)
            elif columns is None:
                self._fill_weight(part, values, past_cache=False)
            else:
                whole_rows = self._staged("rows", part.shape, part.dtype)
                self._fill(part, whole_rows, past_cache=False)
                values.copy_(whole_rows[:, columns.start : columns.stop])
            if values is not out:
                copy_matrix(values, out)

    def close(self) -> None:
        """Close every shard that was opened; reading again opens it anew."""
        self._files.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, entry: TensorEntry, *, past_cache: bool) -> torch.Tensor:
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self._fill(entry, out, past_cache=past_cache)
        return out

    def _read_values(self, entry: TensorEntry, out: torch.Tensor, *, past_cache: bool) -> None:
        """Fill `out`, contiguous or not, with a weight's values."""
        if is_transposed(out):
            rows = self._staged("rows", entry.shape, out.dtype)
            self._read_values(entry, rows, past_cache=past_cache)
            copy_matrix(rows, out)
        elif entry.dtype == torch.float8_e4m3fn:
            scale_inv = self._read(find_scale(self.index, entry), past_cache=past_cache)
            self._dequantise_into(entry, scale_inv, out, past_cache=past_cache)
        else:
            self._fill_weight(entry, out, past_cache=past_cache)

    def _fill_weight(self, entry: TensorEntry, out: torch.Tensor, *, past_cache: bool) -> None:
        if entry.dtype == out.dtype and _is_fillable(out):
            self._fill(entry, out, past_cache=past_cache)
        else:
            out.copy_(self._read(entry, past_cache=past_cache))

    def _dequantise_part_into(
        self, entry: TensorEntry, rows: range, columns: range, out: torch.Tensor
    ) -> None:
        if not out.numel():
            return
        scale_inv = self._read(find_scale(self.index, entry), past_cache=False)
        (row_blocks, all_rows), (column_blocks, all_columns) = (
            _blocks_of(part, size) for part, size in zip((rows, columns), entry.shape, strict=True)
        )
        covered = _rows_of(entry, all_rows)
        codes = self._staged("codes", covered.shape, covered.dtype)
        self._fill(covered, codes, past_cache=False)
        values = dequantise(
            codes[:, all_columns.start : all_columns.stop].contiguous(),
            scale_inv[row_blocks, column_blocks],
            out=out if (all_rows, all_columns) == (rows, columns) else None,
            dtype=out.dtype,
        )
        if values is not out:
            first_row, first_column = rows.start - all_rows.start, columns.start - all_columns.start
            out.copy_(values[first_row:, first_column:][: len(rows), : len(columns)])

    @contextmanager
    def _converting(self) -> Iterator[None]:
        """Count the time of the block as spent on weights."""
        started = time.perf_counter()
        yield
        with self._lock:
            self._converting_s += time.perf_counter() - started

    def _dequantise_into(
        self, entry: TensorEntry, scale_inv: torch.Tensor, out: torch.Tensor, *, past_cache: bool
    ) -> None:
        weight_fp8 = self._staged("codes", entry.shape, entry.dtype)
        self._fill(entry, weight_fp8, past_cache=past_cache)
        if out.device.type == "cpu":
            dequantise(weight_fp8, scale_inv, out=out, dtype=out.dtype)
        else:
            out.copy_(dequantise(weight_fp8, scale_inv, dtype=out.dtype))

    def _staged(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """This thread's buffer for a use, as a tensor of that shape and dtype, its content left over."""
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer: torch.Tensor | None = getattr(self._staging, use, None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            setattr(self._staging, use, buffer)
        return buffer[:num_bytes].view(dtype).view(shape)

    def _fill(self, entry: TensorEntry, out: torch.Tensor, *, past_cache: bool) -> None:
        if entry.size_bytes == 0:
            return
        memory = out.view(-1).view(torch.uint8)
        started = time.perf_counter()
        try:
            count = self._files.read_into(entry.file, entry.offset, memory, past_cache=past_cache)
        except OSError as error:
            raise _unreadable(entry, str(error)) from error
        if count < entry.size_bytes:
            raise _unreadable(entry, f"the file ends after {count} of {entry.size_bytes} bytes")
        with self._lock:
            self._num_bytes_read += count
            self._reading_s += time.perf_counter() - started


def find_scale(index: TensorIndex, entry: TensorEntry) -> TensorEntry:
    """The entry of the block scales that belong to an FP8 weight.

    Raises:
        CheckpointError: There are none, or they are not float32 with one value per block.
    """
    name = scale_name(entry.name)
    if name not in index:
        raise CheckpointError(
            f"{entry.name} in {entry.file} is FP8 without scales",
            expected=f"a tensor {name}",
            found="none in any shard",
            next_step="Without scales the values are unknown: fetch the shard that holds them.",
        )
    scale = index[name]
    expected = scale_shape(entry.shape)
    if len(entry.shape) != 2 or scale.shape != expected or scale.dtype != torch.float32:
        raise CheckpointError(
            f"{name} in {scale.file} does not fit its weight {list(entry.shape)}",
            expected=f"torch.float32 {list(expected)}, one scale per 128 × 128 block",
            found=f"{scale.dtype} {list(scale.shape)}",
            next_step="Use a checkpoint quantised in blocks of 128 × 128.",
        )
    return scale


def _rows_of(entry: TensorEntry, rows: range) -> TensorEntry:
    """Some rows of a tensor, as an entry of their own.

    Raises:
        ValueError: There are no such rows.
    """
    _check_range(rows, entry.shape[0], f"{entry.name} has", "rows")
    row_bytes = entry.size_bytes // max(entry.shape[0], 1)
    return replace(
        entry,
        shape=(len(rows), *entry.shape[1:]),
        offset=entry.offset + rows.start * row_bytes,
        size_bytes=len(rows) * row_bytes,
    )


def _check_range(part: range, size: int, what: str, unit: str) -> None:
    if part.step != 1 or not 0 <= part.start <= part.stop <= size:
        raise ValueError(f"{what} {size} {unit}, not {part}")


def _blocks_of(part: range, size: int) -> tuple[slice, range]:
    """The blocks of an FP8 weight's dim that hold a part of it, and the indices that these cover."""
    start, stop = part.start // BLOCK_SIZE, -(-part.stop // BLOCK_SIZE)
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


def _check_out(entry: TensorEntry, out: torch.Tensor) -> None:
    if tuple(out.shape) != entry.shape:
        raise ValueError(f"{entry.name} has shape {list(entry.shape)}, out has {list(out.shape)}")


def _unreadable(entry: TensorEntry, found: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.name} cannot be read from {entry.file}",
        expected=f"{entry.size_bytes} bytes at {entry.offset}",
        found=found,
        next_step="Fetch the file again.",
    )
