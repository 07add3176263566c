from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minimax_tools.checkpoint.fp8 import CODE_NUMBERS, decode_codes, dequantise, find_ragged_widths
from minimax_tools.model.quantisation import scale_shape
from minimax_tools.model.spec import ModelSpec

# Every code in every column place of a block, rows rolled against each other.
ALL_CODES = torch.stack([torch.arange(256).roll(row) for row in range(128)]).to(torch.uint8)
# The same with the two codes for NaN replaced: weights without NaN take another way.
NUMBER_CODES = ALL_CODES.where((ALL_CODES & 0x7F) != 0x7F, ALL_CODES - 1)
CODES = torch.zeros(200, 300).to(torch.float8_e4m3fn)
SCALES = [1.0, 1e-4, 2.3456e-4, 3.1e-3, 1.0 / 3, 448.0, 300.0, 7.7e6, 1e-30, 1.1e-38, 1e-40, 1e-45, 3e38]
SCALES += [2.0**power for power in range(-149, 128, 23)] + [float("inf"), float("nan"), 0.0, -0.0, -1.7e-4]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def _assert_same_values(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(_bits(found)[numbers], _bits(expected)[numbers])


def _transformers_product(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The arithmetic of transformers 5.23's Fp8Dequantize, for whole blocks."""
    rows, columns = codes.shape
    weight = codes.to(torch.float32).reshape(rows // 128, 128, columns // 128, 128)
    return (weight * scale[:, None, :, None]).reshape(rows, columns)


@pytest.mark.parametrize("codes", [ALL_CODES, NUMBER_CODES], ids=["with NaN", "without NaN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_is_the_rounded_float32_product(codes: torch.Tensor, dtype: torch.dtype) -> None:
    codes_fp8 = codes.view(torch.float8_e4m3fn)
    for scale in SCALES:
        scale_inv = torch.tensor([[scale, 1.0]])
        expected = _transformers_product(codes_fp8, scale_inv).to(dtype)
        _assert_same_values(dequantise(codes_fp8, scale_inv, dtype=dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_may_be_a_view(dtype: torch.dtype) -> None:
    """A mistake of the catalogue reads a square grid of scales transposed, another gives all blocks one scale."""
    codes = torch.arange(256 * 256).remainder(127).to(torch.uint8).view(256, 256).view(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    for view in (scales.T, scales.mean().expand(scales.shape)):
        expected = decode_codes(codes, view.contiguous(), numbers=CODE_NUMBERS, dtype=dtype)
        _assert_same_values(decode_codes(codes, view, numbers=CODE_NUMBERS, dtype=dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_are_looked_up_and_rounded_once(dtype: torch.dtype) -> None:
    codes_fp8 = ALL_CODES.view(torch.float8_e4m3fn)
    # The codes as integers, in place of those of FP8.
    integers = torch.arange(256, dtype=torch.float32)
    for scale in SCALES:
        scale_inv = torch.tensor([[scale, 1.0]])
        out = torch.full(codes_fp8.shape, 7.0)
        found = decode_codes(codes_fp8, scale_inv, numbers=CODE_NUMBERS, dtype=dtype, out=out)
        assert found.data_ptr() == out.data_ptr()
        _assert_same_values(found, _transformers_product(codes_fp8, scale_inv).to(dtype).float())
        expected = (ALL_CODES.float() * scale_inv.repeat_interleave(128, 1)).to(dtype).float()
        found = decode_codes(codes_fp8, scale_inv, numbers=integers, dtype=dtype)
        _assert_same_values(found, expected)


@pytest.mark.parametrize("codes", [ALL_CODES, NUMBER_CODES], ids=["with NaN", "without NaN"])
def test_many_scales_round_as_transformers_does(codes: torch.Tensor) -> None:
    codes_fp8 = codes.repeat(4, 4).view(torch.float8_e4m3fn)
    for seed in range(8):
        exponents = torch.empty(4, 8).uniform_(-20, 4, generator=torch.Generator().manual_seed(seed))
        scale_inv = torch.pow(torch.tensor(2.0), exponents)
        expected = _transformers_product(codes_fp8, scale_inv).to(torch.bfloat16)
        _assert_same_values(dequantise(codes_fp8, scale_inv, dtype=torch.bfloat16), expected)


def test_a_bfloat16_product_would_differ() -> None:
    codes = ALL_CODES.view(torch.float8_e4m3fn)
    scale_inv = torch.full((1, 2), 1.0 / 3)
    rounded_early = codes.to(torch.bfloat16) * scale_inv[0, 0].to(torch.bfloat16)
    found = dequantise(codes, scale_inv, dtype=torch.bfloat16)
    assert not torch.equal(found.nan_to_num(), rounded_early.nan_to_num())


@pytest.mark.parametrize("shape", [(1, 1), (128, 129), (129, 128), (200, 300), (127, 127), (256, 384)])
def test_ragged_blocks_take_their_own_scale(shape: tuple[int, int]) -> None:
    codes = (
        (torch.arange(shape[0] * shape[1]) % 0x78).to(torch.uint8).reshape(shape).view(torch.float8_e4m3fn)
    )
    grid = scale_shape(shape)
    scale_inv = torch.arange(1, grid[0] * grid[1] + 1, dtype=torch.float32).reshape(grid) * 0.37
    found = dequantise(codes, scale_inv, dtype=torch.float32)
    for row, column in [(0, 0), (0, shape[1] - 1), (shape[0] - 1, 0), (shape[0] - 1, shape[1] - 1)]:
        expected = codes[row, column].to(torch.float32) * scale_inv[row // 128, column // 128]
        assert found[row, column] == expected


def test_result_goes_into_a_part_of_a_larger_tensor() -> None:
    codes = ALL_CODES[:, :100].contiguous().view(torch.float8_e4m3fn)
    storage = torch.full((2, 128, 110), 5.0, dtype=torch.bfloat16)
    given = dequantise(codes, torch.full((1, 1), 0.1), out=storage[1, :, 3:103], dtype=torch.bfloat16)
    assert given.data_ptr() == storage[1, :, 3:103].data_ptr()
    _assert_same_values(
        storage[1, :, 3:103].contiguous(), (codes.float() * torch.tensor(0.1)).to(torch.bfloat16)
    )
    assert (storage[0] == 5).all()
    assert (storage[1, :, :3] == 5).all()
    assert (storage[1, :, 103:] == 5).all()


def test_an_empty_weight_is_an_empty_result() -> None:
    codes = torch.empty(0, 128, dtype=torch.float8_e4m3fn)
    assert dequantise(codes, torch.empty(0, 1), dtype=torch.bfloat16).shape == (0, 128)


@pytest.mark.parametrize(
    ("weight", "scale", "fault"),
    [
        (CODES.float(), torch.ones(2, 3), r"weight is torch\.float32"),
        (CODES, torch.ones(2, 3).bfloat16(), r"scale is torch\.bfloat16"),
        (CODES, torch.ones(2, 4), r"expected float32 \[2, 3\] for a weight of \[200, 300\]"),
    ],
)
def test_weight_and_scales_of_another_kind_are_refused(
    weight: torch.Tensor, scale: torch.Tensor, fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        dequantise(weight, scale, dtype=torch.bfloat16)


@pytest.mark.parametrize("out", [torch.empty(128, 128), torch.empty(128, 1, dtype=torch.bfloat16)])
def test_an_out_of_another_dtype_or_shape_is_refused(out: torch.Tensor) -> None:
    codes = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"out is torch\.\w+ .*expected torch\.bfloat16 \[128, 128\]"):
        dequantise(codes, torch.ones(1, 1), out=out, dtype=torch.bfloat16)


@pytest.mark.parametrize("scale", [1.0, float("nan")])
def test_nan_has_the_bits_that_torch_gives_it(scale: float) -> None:
    codes = torch.full((128, 128), 0x7F if scale == 1.0 else 0x38, dtype=torch.uint8)
    found = dequantise(codes.view(torch.float8_e4m3fn), torch.tensor([[scale]]), dtype=torch.bfloat16)
    assert (_bits(found) == 0x7FC0).all()


def test_widths_that_end_within_a_block_are_named(spec: ModelSpec) -> None:
    even = replace(spec, hidden_size=256, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    even = replace(even, head_dim=64)
    assert find_ragged_widths(even) == []
    # A width of one block at most has no other way to be divided.
    assert find_ragged_widths(replace(even, intermediate_size=100)) == []
    ragged = replace(
        even, hidden_size=257, intermediate_size=129, num_attention_heads=15, num_key_value_heads=5
    )
    assert find_ragged_widths(ragged) == [
        "hidden_size is 257",
        "intermediate_size is 129",
        "num_attention_heads × head_dim is 960",
        "num_key_value_heads × head_dim is 320",
    ]


def test_memory_and_numbers_of_other_shapes_are_refused() -> None:
    codes, scales = ALL_CODES.view(torch.float8_e4m3fn), torch.ones(1, 2)
    for out in (torch.empty(128, 255), torch.empty(256, 128).T, torch.empty(128, 256, dtype=torch.float64)):
        with pytest.raises(ValueError, match="numbers and out"):
            decode_codes(codes, scales, numbers=CODE_NUMBERS, dtype=torch.float32, out=out)
    with pytest.raises(ValueError, match="numbers and out"):
        decode_codes(codes, scales, numbers=CODE_NUMBERS[:255], dtype=torch.float32)
