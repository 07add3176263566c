"""The mean of misfits over tokens, without the worst of them."""

from __future__ import annotations

import math

import pytest
import torch

from compare.diagnosis.yardstick import trimmed_mean


@pytest.mark.parametrize("lost", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_value_that_is_not_finite_makes_the_mean_infinite(lost: float, dtype: torch.dtype) -> None:
    assert trimmed_mean(torch.tensor([1.0, lost, lost], dtype=dtype)) == math.inf


@pytest.mark.parametrize("worst", [9.0, math.inf, math.nan])
def test_worst_value_is_left_out(worst: float) -> None:
    assert trimmed_mean(torch.tensor([1.0, worst, 3.0])) == 2.0


def test_no_values_have_an_infinite_mean() -> None:
    assert trimmed_mean(torch.zeros(0)) == math.inf
