from __future__ import annotations

import pytest
import torch

from minimax_tools.reference.rounding import Rounding, RoundingKind, rounded_rows

EXACT, NEAREST, RANDOM = RoundingKind


def numbers() -> torch.Tensor:
    return torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 4096)


def apply(values: torch.Tensor, *kinds: RoundingKind, seed: int = 1, draw: int = 0) -> torch.Tensor:
    return Rounding(seed=seed).apply(values.clone(), rounded_rows(torch.tensor(kinds)), draw=draw)


def test_each_row_rounds_in_its_own_way() -> None:
    values = numbers()
    rounded = apply(values, EXACT, NEAREST, RANDOM)
    assert torch.equal(rounded[0], values[0])
    assert torch.equal(rounded[1], values[1].bfloat16().float())
    assert not torch.equal(rounded[2], values[2])


def test_random_steps_cost_what_rounding_to_nearest_costs() -> None:
    values = numbers()[:1].repeat(2, 1)
    relative = (apply(values, NEAREST, RANDOM) - values) / values
    nearest, random = relative.square().mean(dim=-1).sqrt().tolist()
    assert random == pytest.approx(nearest, rel=0.1)
    assert relative[1].mean().abs() < 3 * random / 64


def test_no_random_step_reaches_further_than_half_a_step_of_bfloat16() -> None:
    values = numbers()
    moved = (apply(values, RANDOM, RANDOM, RANDOM) - values).abs()
    assert bool((moved <= values.abs() * 2.0**-8).all())


def test_random_steps_hang_on_seed_and_draw_alone() -> None:
    values = numbers()
    first = apply(values, EXACT, EXACT, RANDOM)
    assert torch.equal(first, apply(values, EXACT, EXACT, RANDOM))
    assert not torch.equal(first, apply(values, EXACT, EXACT, RANDOM, seed=2))
    assert not torch.equal(first, apply(values, EXACT, EXACT, RANDOM, draw=1))


def test_zero_stays_zero() -> None:
    assert not apply(torch.zeros(1, 8), RANDOM).any()
