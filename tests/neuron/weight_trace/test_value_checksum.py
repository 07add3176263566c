"""Tests of the value checksum."""

from __future__ import annotations

import torch

from neuron.weight_trace.value_checksum import ValueChecksum


def test_order_does_not_matter() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert ValueChecksum.of(values) == ValueChecksum.of(values.flip(0))
    assert ValueChecksum.of(values) != ValueChecksum.of(-values)


def test_squares_are_those_of_finite_values() -> None:
    checksum = ValueChecksum.of(torch.tensor([3.0, torch.inf, -torch.inf, torch.nan]))
    assert checksum.squares == 9.0
    assert checksum.num_nonfinite == 3
