"""The interval of ρ, and the groups that it leaves out one by one: prompts, or blocks of neighbouring tokens."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import t as student

from compare.noise.rho import rho_interval

NUM_TOKENS = 60
ERROR = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(0)) + 1.0
FLOOR = torch.rand(NUM_TOKENS, generator=torch.Generator().manual_seed(1)) + 1.0


def jackknife(error: torch.Tensor, floor: torch.Tensor, groups: torch.Tensor) -> tuple[float, float]:
    """Compute the interval as the textbook does, one group after the other."""
    number = len(groups.unique())
    logarithms = torch.stack(
        [
            (error[groups != group].sum() / floor[groups != group].sum()).sqrt().log()
            for group in groups.unique()
        ]
    )
    variance = (number - 1) / number * float((logarithms - logarithms.mean()).square().sum())
    reach = float(student.ppf(0.975, number - 1)) * math.sqrt(variance)
    rho = float((error.sum() / floor.sum()).sqrt())
    return rho * math.exp(-reach), rho * math.exp(reach)


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        ([0] * 15 + [4] * 5 + [7] * 30 + [9] * 10, [0] * 15 + [4] * 5 + [7] * 30 + [9] * 10),
        # Ten blocks of one prompt, and as many as there are tokens if these are fewer.
        ([3] * 60, [block for block in range(10) for _ in range(6)]),
        ([0] * 7, list(range(7))),
        ([0, 0, 1], [0, 1, 2]),
        # Three prompts are enough.
        ([0] * 30 + [1] * 20 + [2] * 10, [0] * 30 + [1] * 20 + [2] * 10),
    ],
)
def test_interval_is_that_of_the_textbook(prompts: list[int], groups: list[int]) -> None:
    error, floor = ERROR[: len(prompts)].double(), FLOOR[: len(prompts)].double()
    places = torch.stack((torch.tensor(prompts), torch.arange(len(prompts))), dim=1)
    found = rho_interval(error, floor, places)
    assert found == pytest.approx(jackknife(error, floor, torch.tensor(groups)), rel=1e-9)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_two_tokens_or_fewer_have_no_interval(num_tokens: int) -> None:
    places = torch.zeros(num_tokens, 2, dtype=torch.int64)
    assert rho_interval(ERROR[:num_tokens], FLOOR[:num_tokens], places) is None


@pytest.mark.parametrize("side", ["error", "floor"])
def test_a_sum_that_one_group_has_alone_gives_none(side: str) -> None:
    alone = torch.zeros(4).index_fill_(0, torch.tensor(1), 2.0)
    error, floor = (alone, torch.ones(4)) if side == "error" else (torch.ones(4), alone)
    assert rho_interval(error, floor, torch.stack((torch.arange(4), torch.zeros(4)), dim=1)) is None
