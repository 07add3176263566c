"""Generated weights that quantisation keeps, held against plain quantisers."""

from __future__ import annotations

import pytest
import torch

from neuron.weight_trace.trial import EXACT_VALUES

ROWS, COLUMNS = 384, 256
BY_ROW, BY_BLOCK = "INT8 with a scale for each row", "INT8 with a scale for each block"


def matrix(seed: int = 0, size: float = 0.05) -> torch.Tensor:
    return size * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def quantise(weight: torch.Tensor, height: int, width: int, *, shift: int = 0) -> torch.Tensor:
    """Through INT8 with a scale for each part; `shift` takes the scale of a part before."""
    parts = weight.reshape(ROWS // height, height, COLUMNS // width, width)
    scales = parts.abs().amax((1, 3), keepdim=True) / 127
    codes = (parts / scales).round().clamp(-127, 127)
    return (codes * scales.roll(shift, 0)).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize(
    ("name", "height", "width"),
    [(BY_ROW, 1, COLUMNS), (BY_ROW, 1, 128), (BY_ROW, 1, 32), (BY_BLOCK, 128, 128), (BY_BLOCK, 1, 64)],
)
def test_int8_keeps_them_and_a_scale_of_another_place_does_not(name: str, height: int, width: int) -> None:
    kept = EXACT_VALUES[name](matrix())
    assert torch.equal(quantise(kept, height, width), kept)
    assert not torch.equal(quantise(kept, height, width, shift=1), kept)


def test_they_are_bf16_numbers_with_the_signs_of_the_others() -> None:
    for keep in EXACT_VALUES.values():
        kept = keep(matrix())
        assert torch.equal(kept.bfloat16().float(), kept)
        large = matrix().abs() > 0.05
        assert bool((kept.sign() == matrix().sign())[large].all())


def test_values_of_one_way_are_lost_in_another() -> None:
    by_row, by_block = EXACT_VALUES[BY_ROW](matrix()), EXACT_VALUES[BY_BLOCK](matrix())
    assert not torch.equal(quantise(by_row, 128, 128), by_row)
    assert not torch.equal(quantise(by_block, 1, COLUMNS), by_block)
    # FP8 has three bits behind the first.
    assert not torch.equal(by_row.to(torch.float8_e4m3fn).float(), by_row)


def test_matrices_of_one_width_may_be_quantised_side_by_side() -> None:
    first, second = (EXACT_VALUES[BY_BLOCK](matrix(seed, size)) for seed, size in ((0, 0.05), (1, 0.2)))
    halves = torch.cat((first[:64], second[:64])).repeat(3, 1)
    assert torch.equal(quantise(halves, 128, 128), halves)
