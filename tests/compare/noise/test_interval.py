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


def interval(num_prompts: int) -> tuple[float, float]:
    places = torch.stack([torch.arange(NUM_TOKENS) % num_prompts, torch.arange(NUM_TOKENS)], dim=1)
    found = rho_interval(ERROR, FLOOR, places)
    assert found is not None
    return found


def test_two_prompts_are_too_few_and_blocks_stand_in_for_them() -> None:
    assert interval(2) == interval(1)


def test_three_prompts_are_the_groups() -> None:
    assert interval(3) != interval(1)


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
    ],
)
def test_interval_is_that_of_the_textbook(prompts: list[int], groups: list[int]) -> None:
    error, floor = ERROR[: len(prompts)].double(), FLOOR[: len(prompts)].double()
    places = torch.stack((torch.tensor(prompts), torch.arange(len(prompts))), dim=1)
    found = rho_interval(error, floor, places)
    assert found == pytest.approx(jackknife(error, floor, torch.tensor(groups)), rel=1e-9)


def test_no_token_has_no_interval() -> None:
    assert rho_interval(torch.zeros(0), torch.zeros(0), torch.zeros(0, 2, dtype=torch.int64)) is None


@pytest.mark.parametrize("side", ["error", "floor"])
def test_a_sum_that_one_group_has_alone_gives_none(side: str) -> None:
    alone = torch.zeros(4).index_fill_(0, torch.tensor(1), 2.0)
    error, floor = (alone, torch.ones(4)) if side == "error" else (torch.ones(4), alone)
    assert rho_interval(error, floor, torch.stack((torch.arange(4), torch.zeros(4)), dim=1)) is None


class TestInterval:
    @staticmethod
    def squares(num_tokens: int, *, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        ratios = (spread * torch.randn(num_tokens, generator=generator, dtype=torch.float64)).exp()
        return 4.0 * ratios, torch.ones(num_tokens, dtype=torch.float64)

    @staticmethod
    def places(*lengths: int) -> torch.Tensor:
        return torch.tensor(
            [(row, position) for row, length in enumerate(lengths) for position in range(length)]
        )

    def test_it_holds_rho_and_narrows_with_agreement(self) -> None:
        places = self.places(30, 30, 30, 30)
        widths = []
        for spread in (0.1, 1.0):
            error, floor = self.squares(120, spread=spread)
            found = rho_interval(error, floor, places)
            assert found is not None
            assert found[0] < float((error.sum() / floor.sum()).sqrt()) < found[1]
            widths.append(found[1] / found[0])
        assert widths[0] < widths[1]

    def test_one_prompt_is_told_by_its_tokens(self) -> None:
        error, floor = self.squares(50, spread=0.5)
        assert rho_interval(error, floor, self.places(50)) is not None

    def test_too_little_to_tell_gives_none(self) -> None:
        error, floor = self.squares(2, spread=0.5)
        assert rho_interval(error, floor, self.places(2)) is None
        error, floor = self.squares(50, spread=0.5)
        assert rho_interval(error, torch.zeros_like(floor), self.places(50)) is None
