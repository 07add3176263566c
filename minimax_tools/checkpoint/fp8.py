"""FP8 weights in blocks: float8_e4m3fn codes times one float32 scale per 128 × 128 block, rounded once.

A code is sign, four bits of exponent (bias 7) and three of mantissa; as a bfloat16 (bias 127) the same bits,
moved to where a bfloat16 has them, mean the number times 2⁻¹²⁰, subnormals included. So a code becomes a float
by three integer operations, many times faster than torch's cast. Only the codes for NaN do not survive that.
R rows, C columns of a weight; the last block of a row or column may be ragged.
"""

from __future__ import annotations

import torch

from minimax_tools.spec import ModelSpec

BLOCK_SIZE = 128

# What lies between the passes stays in the processor's cache, and a chunk is large enough for other threads to get
# their turn at Python meanwhile.
_CHUNK_CODES = 256 * 3072
_EXPONENT_GAP = 2.0**120
_MANTISSA_SHIFT = 4
# Bit 15, the sign, and bits 10 to 4, all else of a code: in every 16 bits of a signed 64-bit integer.
_BFLOAT16_MASK = 0x87F0_87F0_87F0_87F0 - (1 << 64)
_CODES_PER_WORD = 4
# Scales from here on would overflow float32 where they make up for the exponents' gap.
_LARGEST_SCALE = 2.0**7


def scale_shape(weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight [R,C]: one per block, ragged blocks included."""
    return tuple(-(-size // BLOCK_SIZE) for size in weight_shape)


def find_ragged_widths(spec: ModelSpec) -> list[str]:
    """Widths of a model, in words, that are over a block and no multiple of one.

    Readers that derive the block from the shapes of weight and scales get those wrong.
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
    """The weight [R,C] in `dtype`: codes times block scales in float32, rounded once; NaN codes stay NaN.

    Args:
        weight_fp8: float8_e4m3fn [R,C], on any device; fast on the CPU.
        scale_inv: float32 [ceil(R/128), ceil(C/128)], to be multiplied; on the same device.
        out: Where the result goes, [R,C] of `dtype`, there too; made where absent.
        dtype: Of the result.

    Raises:
        ValueError: A dtype or shape is not as above.
    """
    _check(weight_fp8, scale_inv)
    result = torch.empty(weight_fp8.shape, dtype=dtype, device=weight_fp8.device) if out is None else out
    if result.shape != weight_fp8.shape or result.dtype != dtype:
        raise ValueError(
            f"out is {result.dtype} {list(result.shape)}, expected {dtype} {list(weight_fp8.shape)}"
        )
    # The product must be float32: rounding the scale or the product early gives other BF16 bits.
    fits = _fits_words(weight_fp8) and _fits_bfloat16(scale_inv)
    if not fits or _multiply_as_bfloat16(weight_fp8, scale_inv, result):
        _multiply(weight_fp8, scale_inv, result)
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


def _fits_words(weight_fp8: torch.Tensor) -> bool:
    if weight_fp8.device.type != "cpu" or not weight_fp8.is_contiguous() or not weight_fp8.numel():
        return False
    num_columns = weight_fp8.shape[1]
    return num_columns % min(BLOCK_SIZE, num_columns) == 0 and num_columns % _CODES_PER_WORD == 0


def _fits_bfloat16(scale_inv: torch.Tensor) -> bool:
    # Written so that a scale that is NaN does not pass; one that is no more than zero would turn zeros' signs.
    return bool(((scale_inv > 0) & (scale_inv < _LARGEST_SCALE)).all())


def _multiply_as_bfloat16(weight_fp8: torch.Tensor, scale_inv: torch.Tensor, result: torch.Tensor) -> bool:
    """Multiply where no code is NaN; whether one was, and the result is none."""
    num_rows, num_columns = weight_fp8.shape
    # A piece: a row's codes of one block, which share a scale.
    width = min(BLOCK_SIZE, num_columns)
    # Exact, being a power of two; the float32 product below is then that of the code and its own scale.
    scale = (scale_inv * _EXPONENT_GAP).repeat_interleave(BLOCK_SIZE, dim=0)[:num_rows].flatten()
    num_pieces = min(_CHUNK_CODES // width, len(scale))
    codes = weight_fp8.view(torch.int8).flatten().split(num_pieces * width)
    # NaN is 0x7f and 0xff: the largest code read as a signed byte, and the largest read as an unsigned one.
    largest = torch.empty(len(codes), dtype=torch.int8)
    largest_unsigned = torch.empty(len(codes), dtype=torch.uint8)
    chunks = zip(
        codes,
        scale.split(num_pieces),
        result.view(1, -1, width).split(num_pieces, dim=1),
        largest.unbind(),
        largest_unsigned.unbind(),
        strict=True,
    )
    product: _PieceProduct | None = None
    for chunk, factors, out, signed, unsigned in chunks:
        if product is None or len(factors) != product.num_pieces:
            product = _PieceProduct(len(factors), width)
        torch.amax(chunk, 0, out=signed)
        torch.amax(chunk.view(torch.uint8), 0, out=unsigned)
        product(chunk, factors, out)
    return bool((largest == 0x7F).any() or (largest_unsigned == 0xFF).any())


class _PieceProduct:
    """Pieces of codes, a float32 factor each, as BF16 or float32: their product in float32, rounded once.

    Of torch's operations only batch normalisation takes BF16 values with float32 factors as they are: with mean 0,
    variance 1 and a bias of −0, which leaves every sum as it is, it is that product in a single pass.

    Args:
        num_pieces: How many.
        width: Codes in each.
    """

    def __init__(self, num_pieces: int, width: int) -> None:
        self.num_pieces = num_pieces
        self._integers = torch.empty(num_pieces * width, dtype=torch.int16)
        self._words = self._integers.view(torch.int64)
        self._values = self._integers.view(torch.bfloat16).view(1, num_pieces, width)
        self._bias, self._mean = -torch.zeros(num_pieces), torch.zeros(num_pieces)
        self._variance, self._unused = torch.ones(num_pieces), torch.empty(0)

    def __call__(self, codes: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
        self._integers.copy_(codes)
        # Four codes a word: what a shift carries into a neighbour is masked away.
        self._words.bitwise_left_shift_(_MANTISSA_SHIFT).bitwise_and_(_BFLOAT16_MASK)
        if out.dtype != torch.bfloat16:
            out.copy_(self._values.to(torch.float32).mul_(factors[:, None]))
            return
        torch.native_batch_norm(
            self._values,
            factors,
            self._bias,
            self._mean,
            self._variance,
            False,  # not training: mean and variance are those given
            0.0,
            0.0,
            out=(out, self._unused, self._unused),
        )


def _multiply(weight_fp8: torch.Tensor, scale_inv: torch.Tensor, result: torch.Tensor) -> None:
    scale = scale_inv.repeat_interleave(BLOCK_SIZE, dim=1)[:, : weight_fp8.shape[1]]
    for start in range(0, weight_fp8.shape[0], BLOCK_SIZE):
        rows = slice(start, start + BLOCK_SIZE)
        result[rows].copy_(weight_fp8[rows].to(torch.float32).mul_(scale[start // BLOCK_SIZE]))
