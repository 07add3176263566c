"""Fast transposed copies: a matrix written as columns.

Kernels that take expert weights as [in, out] hold them transposed to the checkpoint. A plain copy to a transposed
view jumps by whole rows. These lie a multiple of a page apart and fall into the same few cache lines.
R rows, C columns.
"""

from __future__ import annotations

import torch

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
