"""Line sums: checksums of a matrix's rows and columns, by which a line is known again wherever a port puts it.

A line is a row or a column. Its sum adds up a hash of each of its values, modulo 2⁶⁴:

- It is the same in whatever order the values lie, so a row is known again in a transposed matrix.
- It is the same in every dtype that holds the values exactly: BF16 and float32, say.
- Zeros do not count, so padding changes no sum.
- The sums of the parts of a line add up to that of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minimax_tools.machine.compiled import compiled

Sums = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Codes = np.ndarray[tuple[int, int], np.dtype[np.unsignedinteger]]

# A BF16 value is the upper half of the same value in float32.
_BF16_SHIFT = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LineSums:
    """Sums of the rows and columns of a matrix [R,C], or of each of several matrices [...,R,C]."""

    rows: Sums  # uint64 [...,R]
    columns: Sums  # uint64 [...,C]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LineSums:
        """Sum up the lines of a floating-point tensor of at least two dims, on the CPU."""
        *lead, num_rows, num_columns = tensor.shape
        rows = np.zeros((*lead, num_rows), dtype=np.uint64)
        columns = np.zeros((*lead, num_columns), dtype=np.uint64)
        matrices = tensor.detach().reshape(-1, num_rows, num_columns)
        for matrix, of_rows, of_columns in zip(
            matrices, rows.reshape(-1, num_rows), columns.reshape(-1, num_columns), strict=True
        ):
            if matrix.is_contiguous() or not matrix.T.is_contiguous():
                _add(matrix, of_rows, of_columns)
            else:
                _add(matrix.T, of_columns, of_rows)
        return cls(rows=rows, columns=columns)


def _add(matrix: torch.Tensor, rows: Sums, columns: Sums) -> None:
    if matrix.dtype == torch.bfloat16:
        codes, shift = matrix.contiguous().view(torch.uint16), _BF16_SHIFT
    else:
        codes, shift = matrix.float().contiguous().view(torch.uint32), 0
    _add_hashes(codes.numpy(), np.uint32(shift), rows, columns)


@compiled(
    "(uint16[:, ::1], uint32, uint64[::1], uint64[::1])",
    "(uint32[:, ::1], uint32, uint64[::1], uint64[::1])",
    sums_in_any_order=True,
)
def _add_hashes(codes: Codes, shift: np.uint32, rows: Sums, columns: Sums) -> None:
    """Add the hash of each element to the sums of its row and its column; `codes << shift` are float32's bits.

    The hash gives every value another number of 32 bits, as its steps can all be undone: no other single value has the
    same sum. The casts of every step keep 32 bits, for vector instructions.
    """
    for row in range(codes.shape[0]):
        line = codes[row]
        total = np.uint64(0)
        for column in range(line.size):
            bits = np.uint32(np.uint32(line[column]) << shift)
            # -0 counts as 0, whose hash is 0.
            bits = np.uint32(0) if bits == np.uint32(1 << 31) else bits
            mixed = np.uint32(bits * np.uint32(0x9E3779B1))
            mixed = np.uint32(mixed ^ (mixed >> np.uint32(15)))
            mixed = np.uint32(mixed * np.uint32(0x85EBCA6B))
            mixed = np.uint32(mixed ^ (mixed >> np.uint32(13)))
            hashed = np.uint64(mixed)
            total += hashed
            columns[column] += hashed
        rows[row] += total
