from __future__ import annotations

import pytest
import torch

from compare.noise.interval import rho_interval
from minimax_tools.metrics.error_structure import Structure, measure_structure

TOKENS, CHANNELS = 160, 256


@pytest.fixture
def twin() -> torch.Tensor:
    return torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(0))


def rounded(exact: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a right implementation's values: noise of BF16's size."""
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(seed))
    return exact * (1.0 + 4e-3 * noise)


def measure(twin: torch.Tensor, target: torch.Tensor) -> Structure:
    structure = measure_structure(
        twin, rounded(twin, 1), target, massive=torch.zeros(CHANNELS, dtype=torch.bool)
    )
    assert structure is not None
    return structure


def rho(twin: torch.Tensor, target: torch.Tensor) -> float:
    return float((target - twin).norm() / (rounded(twin, 1) - twin).norm())


def test_noise_as_large_as_the_goldens_is_near_one(twin: torch.Tensor) -> None:
    found = measure(twin, rounded(twin, 2))
    assert found.token_gain == pytest.approx(1.0, abs=0.2)
    assert found.channel_gain == pytest.approx(1.0, abs=0.2)
    assert found.channel_offset == pytest.approx(1.0, abs=0.2)
    assert found.channel_worst < 1.6


def test_scale_far_below_the_noise_is_seen(twin: torch.Tensor) -> None:
    target = rounded(1.002 * twin, 2)
    assert rho(twin, target) < 1.2
    found = measure(twin, target)
    assert found.token_gain > 3.0
    assert found.channel_gain > 3.0


def test_offset_far_below_the_noise_is_seen(twin: torch.Tensor) -> None:
    offset = 2e-3 * torch.randn(CHANNELS, generator=torch.Generator().manual_seed(3))
    target = rounded(twin, 2) + offset
    assert rho(twin, target) < 1.2
    assert measure(twin, target).channel_offset > 3.0


def test_one_bad_channel_is_seen_and_named(twin: torch.Tensor) -> None:
    target = rounded(twin, 2)
    target[:, 77] *= 1.03
    assert rho(twin, target) < 1.2
    found = measure(twin, target)
    assert (found.worst_channel, found.channel_worst > 5.0) == (77, True)


def test_massive_channels_do_not_hide_the_others_scale(twin: torch.Tensor) -> None:
    massive = torch.zeros(CHANNELS, dtype=torch.bool)
    massive[5] = True
    exact = twin.clone()
    exact[:, 5] = 1000.0
    target = rounded(1.005 * exact, 2)
    target[:, 5] = rounded(exact, 1)[:, 5]
    found = measure_structure(exact, rounded(exact, 1), target, massive=massive)
    assert found is not None
    assert found.token_gain > 3.0


def test_golden_without_an_error_gives_no_structure(twin: torch.Tensor) -> None:
    massive = torch.zeros(CHANNELS, dtype=torch.bool)
    assert measure_structure(twin, twin, rounded(twin, 2), massive=massive) is None


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
