"""The groups that an interval of ρ leaves out one by one: prompts, or blocks of neighbouring tokens."""

from __future__ import annotations

import torch

from compare.noise.interval import rho_interval

NUM_TOKENS = 60
ERROR = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(0)) + 1.0
FLOOR = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(1)) + 1.0


def interval(num_prompts: int) -> tuple[float, float]:
    places = torch.stack([torch.arange(NUM_TOKENS) % num_prompts, torch.arange(NUM_TOKENS)], dim=1)
    found = rho_interval(ERROR, FLOOR, places)
    assert found is not None
    return found


def test_two_prompts_are_too_few_and_blocks_stand_in_for_them() -> None:
    assert interval(2) == interval(1)


def test_three_prompts_are_the_groups() -> None:
    assert interval(3) != interval(1)
