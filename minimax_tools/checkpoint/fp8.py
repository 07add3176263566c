"""FP8 weights in blocks: float8_e4m3fn codes times one float32 scale per 128 × 128 block, rounded once.

R rows, C columns of a weight; the last block of a row or column may be ragged, that is, narrower than 128.
"""

from __future__ import annotations

import numpy as np
import torch

from minimax_tools.machine.compiled import compiled
from minimax_tools.model.quantisation import BLOCK_SIZE, scale_shape
from minimax_tools.model.spec import ModelSpec

Codes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
Scales = np.ndarray[tuple[int, int], np.dtype[np.float32]]
BlockValues = np.ndarray[tuple[int, int, int], np.dtype[np.float32]]
BFloat16Bits = np.ndarray[tuple[int, int], np.dtype[np.uint16]]

# Number of each code of float8_e4m3fn by its byte, float32 [256].
CODE_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def find_ragged_widths(spec: ModelSpec) -> list[str]:
    """Describe the widths of a model that exceed a block without being a multiple of it, as "NAME is WIDTH".

    Other tools that divide a weight's shape by its scales' shape get another block than 128 for these.
    """
    widths = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads × head_dim": spec.query_width,
        "num_key_value_heads × head_dim": spec.key_value_width,
    }
    return [
        f"{name} is {width}" for name, width in widths.items() if width > BLOCK_SIZE and width % BLOCK_SIZE
    ]


def dequantise(
    weight_fp8: torch.Tensor, scale_inv: torch.Tensor, *, out: torch.Tensor | None = None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight [R,C] in `dtype`: codes times block scales in float32, rounded once; NaN codes stay NaN.

    `weight_fp8` is float8_e4m3fn [R,C], `scale_inv` float32 [ceil(R/128), ceil(C/128)], on one device. `out` takes the
    result, instead of new memory.

    Raises:
        ValueError: A dtype or shape differs from the above.
    """
    _check(weight_fp8, scale_inv)
    result = torch.empty(weight_fp8.shape, dtype=dtype, device=weight_fp8.device) if out is None else out
    if result.shape != weight_fp8.shape or result.dtype != dtype:
        raise ValueError(
            f"out is {result.dtype} {list(result.shape)}, expected {dtype} {list(weight_fp8.shape)}"
        )
    if result.device.type == "cpu" and dtype == torch.bfloat16 and result.is_contiguous():
        _multiply_compiled(weight_fp8, scale_inv, result)
    else:
        _multiply_in_torch(weight_fp8, scale_inv, result)
    return result


def decode_codes(
    weight_fp8: torch.Tensor,
    scale_inv: torch.Tensor,
    *,
    numbers: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weight as float32 [R,C]: a number for each code, times the block's scale, rounded once to `dtype`.

    Codes and scales are as in `dequantise`, on the CPU. `numbers` has the number of each code by its byte, float32
    [256]; the format's own are `CODE_NUMBERS`. `out` is memory for the result, contiguous float32.

    Raises:
        ValueError: A dtype or shape differs from the above.
    """
    _check(weight_fp8, scale_inv)
    result = torch.empty(weight_fp8.shape, dtype=torch.float32) if out is None else out
    for tensor, shape in ((numbers, (256,)), (result, tuple(weight_fp8.shape))):
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"numbers and out are contiguous float32, [256] and {list(weight_fp8.shape)}: found {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    # A block has one scale, and so at most 256 values.
    values = (scale_inv[..., None] * numbers).to(dtype).float().contiguous()
    codes = weight_fp8.contiguous().view(torch.uint8)
    _look_up_codes(codes.numpy(), values.numpy(), result.numpy())
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


def _multiply_in_torch(weight_fp8: torch.Tensor, scale_inv: torch.Tensor, result: torch.Tensor) -> None:
    # The product must be float32: rounding the scale or the product early gives other BF16 bits.
    scale = scale_inv.repeat_interleave(BLOCK_SIZE, dim=1)[:, : weight_fp8.shape[1]]
    for start in range(0, weight_fp8.shape[0], BLOCK_SIZE):
        rows = slice(start, start + BLOCK_SIZE)
        result[rows].copy_(_to_float32(weight_fp8[rows]).mul_(scale[start // BLOCK_SIZE]))


def _to_float32(weight_fp8: torch.Tensor) -> torch.Tensor:
    if weight_fp8.device.type != "cpu":
        return weight_fp8.to(torch.float32)
    # torch's own cast on the CPU is many times slower. With scales of 1 this one is exact: BF16 holds every code.
    values = torch.empty(weight_fp8.shape, dtype=torch.bfloat16)
    _multiply_compiled(weight_fp8, torch.ones(scale_shape(tuple(values.shape))), values)
    return values.to(torch.float32)


def _multiply_compiled(weight_fp8: torch.Tensor, scale_inv: torch.Tensor, result: torch.Tensor) -> None:
    """Dequantise on the CPU into contiguous BF16, by the compiled loop."""
    codes, scales = weight_fp8.contiguous().view(torch.uint8), scale_inv.contiguous()
    _multiply_codes(codes.numpy(), scales.numpy(), result.view(torch.uint16).numpy())


@compiled("(uint8[:, ::1], float32[:, ::1], uint16[:, ::1])")
def _multiply_codes(codes: Codes, scales: Scales, result: BFloat16Bits) -> None:
    """Write the BF16 bits of the rounded products of [R,C] codes and their scales.

    A code has one bit of sign, four of exponent (bias 7) and three of mantissa. Without sign, 0 to 7 are subnormal: the
    number is the code times 2⁻⁹. From 8 on codes are normal: 20 bits further left they are a float32, whose exponent
    lacks 120 because its bias is 127. 0x7F is NaN.
    """
    for row in range(codes.shape[0]):
        for block in range(scales.shape[1]):
            scale = scales[row // BLOCK_SIZE, block]
            start = block * BLOCK_SIZE
            # Two things let the compiler use vector instructions: loops over a view, whose indices begin at 0, and the
            # casts of every step to 32 bits, because numba would widen to 64.
            block_codes = codes[row, start : start + BLOCK_SIZE]
            block_result = result[row, start : start + BLOCK_SIZE]
            for column in range(block_codes.size):
                code = np.int32(block_codes[column])
                sign, unsigned = np.int32(code & 0x80), np.int32(code & 0x7F)
                normal = np.int32(np.int32(unsigned << 20) + np.int32(120 << 23)).view(np.float32)
                # A shifted subnormal code would be a subnormal float32: with these, processors are many times slower.
                number = normal if unsigned >= 8 else np.float32(np.float32(unsigned) * np.float32(2.0**-9))
                product = np.float32(number * scale)
                product_bits = np.uint32(product.view(np.uint32) ^ np.uint32(sign << 24))
                # BF16 is float32's upper 16 bits, rounded to the nearest, ties to even.
                is_odd = np.uint32(np.uint32(product_bits >> 16) & 1)
                rounded = np.uint32(np.uint32(product_bits + np.uint32(0x7FFF)) + is_odd) >> 16
                is_nan = (unsigned == 0x7F) | np.isnan(product)
                block_result[column] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


@compiled("(uint8[:, ::1], float32[:, :, ::1], float32[:, ::1])")
def _look_up_codes(codes: Codes, values: BlockValues, result: Scales) -> None:
    """Write the values of [R,C] codes, which each block tells for all 256 codes."""
    for row in range(codes.shape[0]):
        for block in range(values.shape[1]):
            block_values = values[row // BLOCK_SIZE, block]
            start = block * BLOCK_SIZE
            block_codes = codes[row, start : start + BLOCK_SIZE]
            block_result = result[row, start : start + BLOCK_SIZE]
            for column in range(block_codes.size):
                block_result[column] = block_values[block_codes[column]]
