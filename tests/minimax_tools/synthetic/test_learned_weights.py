from __future__ import annotations

import pytest
import torch

from minimax_tools.checkpoint.fp8 import dequantise
from minimax_tools.synthetic.learned_weights import quantise


@pytest.mark.parametrize("shape", [(64, 32), (128, 256), (200, 130)])
def test_codes_and_scales_give_the_weight_back_to_fp8s_rounding(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(weight)
    back = dequantise(codes, scales, dtype=torch.float32)
    error = (back - weight).abs()
    assert bool((error <= weight.abs() / 15 + weight.abs().max() * 2**-17).all())
    assert float(error.max()) > 0


def test_every_block_reaches_the_largest_code() -> None:
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    weight[128:] *= 1e-3
    codes, scales = quantise(weight)
    assert codes.float().abs().unflatten(0, (2, 128)).amax(dim=(1, 2)).tolist() == [448, 448]
    assert scales[0, 0] > 100 * scales[1, 0]


def test_block_of_zeros_stays_zero() -> None:
    codes, scales = quantise(torch.zeros(8, 8))
    assert float(codes.float().abs().max()) == 0
    assert scales.tolist() == [[1.0]]
