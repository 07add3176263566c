from __future__ import annotations

import pytest
import torch

from minimax_tools.metrics.noise_floor import Structure, measure_structure

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
