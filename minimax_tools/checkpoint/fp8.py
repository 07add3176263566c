"""FP8 weights in blocks: float8_e4m3fn codes times one float32 scale per 128 × 128 block, rounded once.

R rows, C columns of a weight; the last block of a row or column may be ragged.
"""

from __future__ import annotations

import torch

BLOCK_SIZE = 128


def scale_shape(weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight [R,C]: one per block, ragged blocks included."""
    return tuple(-(-size // BLOCK_SIZE) for size in weight_shape)


def dequantise(
    weight_fp8: torch.Tensor, scale_inv: torch.Tensor, *, out: torch.Tensor | None = None, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [R,C] in `dtype`: codes times block scales in float32, rounded once; NaN codes stay NaN.

    Args:
        weight_fp8: float8_e4m3fn [R,C] on the CPU.
        scale_inv: float32 [ceil(R/128), ceil(C/128)], to be multiplied.
        out: Where the result goes, [R,C] of `dtype`; made where absent.
        dtype: Of the result.

    Raises:
        ValueError: A dtype or shape is not as above.
    """
    _check(weight_fp8, scale_inv)
    result = torch.empty(weight_fp8.shape, dtype=dtype) if out is None else out
    if result.shape != weight_fp8.shape or result.dtype != dtype:
        raise ValueError(
            f"out is {result.dtype} {list(result.shape)}, expected {dtype} {list(weight_fp8.shape)}"
        )
    num_columns = weight_fp8.shape[1]
    for block, scale_row in enumerate(scale_inv):
        rows = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        scale = scale_row.repeat_interleave(BLOCK_SIZE)[:num_columns]
        # The product must be float32: rounding the scale or the product early gives other BF16 bits.
        result[rows] = weight_fp8[rows].to(torch.float32).mul_(scale)
    return result


def _check(weight_fp8: torch.Tensor, scale_inv: torch.Tensor) -> None:
    if weight_fp8.dtype != torch.float8_e4m3fn or weight_fp8.dim() != 2:
        raise ValueError(
            f"weight is {weight_fp8.dtype} {list(weight_fp8.shape)}, expected float8_e4m3fn [R, C]"
        )
    expected = scale_shape(tuple(weight_fp8.shape))
    if scale_inv.dtype != torch.float32 or tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"scale is {scale_inv.dtype} {list(scale_inv.shape)}, expected float32 {list(expected)} "
            f"for a weight of {list(weight_fp8.shape)}"
        )
