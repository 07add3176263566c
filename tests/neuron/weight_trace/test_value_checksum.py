"""Tests of the value checksum."""

from __future__ import annotations

import pytest
import torch

from neuron.weight_trace.value_checksum import ValueChecksum

# Signed, or not, as the checksum reads bits.
_INTEGERS = {
    torch.float8_e4m3fn: torch.uint8,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


def test_order_does_not_matter() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert ValueChecksum.of(values) == ValueChecksum.of(values.flip(0))
    assert ValueChecksum.of(values) != ValueChecksum.of(-values)


def test_squares_are_those_of_finite_values() -> None:
    checksum = ValueChecksum.of(torch.tensor([3.0, torch.inf, -torch.inf, torch.nan]))
    assert checksum.squares == 9.0
    assert checksum.num_nonfinite == 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32])
def test_values_of_every_width_are_added_up(dtype: torch.dtype) -> None:
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0)).to(dtype)
    checksum = ValueChecksum.of(values)
    bits = values.view(_INTEGERS[dtype]).long()[values.float() != 0]
    assert (checksum.count, checksum.bits) == (len(values), int(bits.sum()))
    assert checksum.squares == pytest.approx(float(values.double().square().sum()))
    assert checksum == ValueChecksum.of(values[:7]) + ValueChecksum.of(values[7:])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_minus_0_is_0(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1.5]).to(dtype)
    assert ValueChecksum.of(values) == ValueChecksum.of(values.float().abs().to(dtype))


def test_two_values_that_change_their_sum_alike_are_told_apart() -> None:
    # The bits of 3 and 5, and of 4 twice: one number more and one less have the same sum.
    codes = torch.tensor([3, 5], dtype=torch.int16), torch.tensor([4, 4], dtype=torch.int16)
    first, second = (ValueChecksum.of(of_pair.view(torch.bfloat16)) for of_pair in codes)
    assert first.bits == second.bits
    assert first != second


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_a_view_with_gaps_has_the_checksum_of_its_copy(dtype: torch.dtype) -> None:
    values = torch.arange(40.0).to(dtype)
    for view in (values[::2], values.view(5, 8).T, values[3].expand(7)):
        assert ValueChecksum.of(view) == ValueChecksum.of(view.clone())
