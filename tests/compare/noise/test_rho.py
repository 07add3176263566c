from __future__ import annotations

import math

import pytest
import torch

from compare.noise.input_error import InputError, measure_input_error
from compare.noise.rho import noise_ratio
from compare.noise.rows import Rows
from compare.noise.squared_errors import square_difference
from minimax_tools.metrics.noise_floor import massive_channels

TOKENS, CHANNELS, MASSIVE = 40, 512, 7


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def places(tokens: int = TOKENS) -> torch.Tensor:
    """Two rows of the batch, one after the other."""
    return torch.stack((torch.arange(tokens) * 2 // tokens, torch.arange(tokens) % (tokens // 2)), dim=-1)


def rows_with(
    target: torch.Tensor,
    *,
    reference: torch.Tensor,
    twin: torch.Tensor,
    stats: bool = False,
    error: float = 0.0,
) -> Rows:
    """Rows with the floor kept whole, or as statistics; `error` is that of an input handed on."""
    massive = massive_channels(reference)
    return Rows(
        reference=reference,
        target=target,
        massive=massive,
        places=places(reference.shape[0]),
        twin=None if stats else twin,
        floor=square_difference(twin, reference, massive=massive) if stats else None,
        input_error=InputError(overall=error, tokens=torch.full((reference.shape[0],), error))
        if error
        else None,
    )


@pytest.fixture
def twin() -> torch.Tensor:
    exact = random(TOKENS, CHANNELS, seed=0)
    exact[:, MASSIVE] = 90.0 + random(TOKENS, seed=1)
    return exact


@pytest.fixture
def reference(twin: torch.Tensor) -> torch.Tensor:
    return twin.bfloat16()


class TestWhole:
    def test_port_as_noisy_as_the_golden_has_one(self, reference: torch.Tensor, twin: torch.Tensor) -> None:
        noise = noise_ratio(rows_with(reference.clone(), reference=reference, twin=twin))
        assert (noise.whole, noise.ordinary, noise.massive) == (1.0, 1.0, 1.0)
        assert (noise.token_median, noise.is_estimated, noise.incoming) == (1.0, False, 0.0)

    def test_port_without_noise_has_zero(self, reference: torch.Tensor, twin: torch.Tensor) -> None:
        noise = noise_ratio(rows_with(twin, reference=reference, twin=twin))
        assert (noise.whole, noise.token_worst) == (0.0, 0.0)

    @pytest.mark.parametrize("factor", [0.5, 3.0, 20.0])
    def test_ratio_is_that_of_the_norms(
        self, factor: float, reference: torch.Tensor, twin: torch.Tensor
    ) -> None:
        target = twin.double() + factor * (reference.double() - twin.double())
        noise = noise_ratio(rows_with(target, reference=reference, twin=twin))
        assert noise.whole == pytest.approx(factor)
        assert noise.token_worst <= factor * (1 + 1e-9)

    def test_floor_of_zero_asks_for_bit_equality(self) -> None:
        exact = random(TOKENS, CHANNELS, seed=0).bfloat16()
        assert noise_ratio(rows_with(exact.clone(), reference=exact, twin=exact.float())).whole == 0.0
        target = exact.clone()
        target[3, 5] = torch.nextafter(target[3, 5], target.new_tensor(math.inf))
        noise = noise_ratio(rows_with(target, reference=exact, twin=exact.float()))
        assert (noise.whole, noise.token_worst, noise.token_median) == (math.inf, math.inf, 0.0)

    def test_rows_without_a_floor_have_no_ratio(self, reference: torch.Tensor) -> None:
        rows = Rows(
            reference=reference, target=reference, massive=massive_channels(reference), places=places()
        )
        assert not rows.has_floor
        with pytest.raises(ValueError, match="no noise floor"):
            noise_ratio(rows)


class TestChannels:
    def test_error_on_ordinary_channels_is_not_hidden_by_massive_ones(
        self, reference: torch.Tensor, twin: torch.Tensor
    ) -> None:
        target = reference.float()
        target[:, :MASSIVE] *= 1.02
        noise = noise_ratio(rows_with(target, reference=reference, twin=twin))
        assert noise.massive == 1.0
        assert noise.ordinary > 1.1 * noise.whole

    def test_error_on_a_massive_channel_is_counted_apart(
        self, reference: torch.Tensor, twin: torch.Tensor
    ) -> None:
        target = reference.float()
        target[:, MASSIVE] *= 1.01
        noise = noise_ratio(rows_with(target, reference=reference, twin=twin))
        assert noise.ordinary == 1.0
        assert noise.massive is not None
        assert noise.massive > noise.whole > 2.0

    def test_without_massive_channels_there_is_no_massive_ratio(self) -> None:
        exact = random(TOKENS, CHANNELS, seed=0)
        noise = noise_ratio(rows_with(exact.bfloat16(), reference=exact.bfloat16(), twin=exact))
        assert noise.massive is None
        assert noise.whole == noise.ordinary

    def test_channels_stay_massive_when_tokens_are_set_aside(self) -> None:
        exact = random(TOKENS, CHANNELS, seed=0)
        exact[: TOKENS // 2, MASSIVE] *= 60.0
        rows = rows_with(exact.bfloat16(), reference=exact.bfloat16(), twin=exact)
        later = rows.select(torch.arange(TOKENS) >= TOKENS // 2)
        assert later.num_tokens == TOKENS // 2
        assert not massive_channels(later.reference).any()
        assert noise_ratio(later).massive == 1.0


class TestTokens:
    def test_worst_token_is_named_by_row_and_position(
        self, reference: torch.Tensor, twin: torch.Tensor
    ) -> None:
        target = reference.float()
        target[33] += 0.1 * random(CHANNELS, seed=2)
        noise = noise_ratio(rows_with(target, reference=reference, twin=twin))
        assert noise.worst_token == (1, 13)
        assert noise.token_worst > 5.0
        assert noise.token_median == 1.0
        assert noise.token_median < noise.whole < noise.token_p99 < noise.token_worst

    def test_token_with_a_tiny_floor_is_held_against_the_median_token(
        self, reference: torch.Tensor, twin: torch.Tensor
    ) -> None:
        reference, target = reference.float(), reference.float()
        reference[5] = twin[5] + 1e-9  # by luck
        noise = noise_ratio(rows_with(target, reference=reference, twin=twin))
        assert noise.token_worst < 2.0

    def test_median_token_tells_what_a_few_large_floors_outweigh(
        self, reference: torch.Tensor, twin: torch.Tensor
    ) -> None:
        reference = reference.float()
        reference[0] += 50.0 * random(CHANNELS, seed=3)
        target = twin + 5.0 * (reference - twin)
        target[0] = reference[0]
        noise = noise_ratio(rows_with(target, reference=reference, twin=twin))
        assert noise.whole < 1.1
        assert noise.token_median > 3.0


class TestEstimate:
    @pytest.mark.parametrize("factor", [1.0, 2.0, 6.0])
    def test_statistics_give_nearly_what_the_twin_gives(self, factor: float) -> None:
        exact = random(TOKENS, CHANNELS, seed=0)
        reference = exact + 0.01 * random(TOKENS, CHANNELS, seed=1)
        target = exact + factor * 0.01 * random(TOKENS, CHANNELS, seed=2)
        full = noise_ratio(rows_with(target, reference=reference, twin=exact))
        estimate = noise_ratio(rows_with(target, reference=reference, twin=exact, stats=True))
        assert (full.is_estimated, estimate.is_estimated) == (False, True)
        assert estimate.whole == pytest.approx(full.whole, rel=0.05)
        assert estimate.token_median == pytest.approx(full.token_median, rel=0.1)

    def test_estimate_of_the_golden_itself_is_zero(self, reference: torch.Tensor, twin: torch.Tensor) -> None:
        noise = noise_ratio(rows_with(reference.clone(), reference=reference, twin=twin, stats=True))
        assert (noise.whole, noise.massive, noise.token_worst) == (0.0, 0.0, 0.0)

    def test_estimate_sees_a_fault_behind_the_rounding_that_both_sides_share(
        self, reference: torch.Tensor, twin: torch.Tensor
    ) -> None:
        target = reference.float() + 0.02 * random(TOKENS, CHANNELS, seed=2)
        full = noise_ratio(rows_with(target, reference=reference, twin=twin))
        estimate = noise_ratio(rows_with(target, reference=reference, twin=twin, stats=True))
        assert full.ordinary > 5.0
        assert math.sqrt(full.ordinary**2 - 2.1) < estimate.ordinary <= full.ordinary


class TestChained:
    def test_error_handed_on_widens_the_floor(self, reference: torch.Tensor, twin: torch.Tensor) -> None:
        target = reference.double() + 0.02 * twin.norm(dim=-1, keepdim=True) * CHANNELS**-0.5
        alone = noise_ratio(rows_with(target, reference=reference, twin=twin))
        chained = noise_ratio(rows_with(target, reference=reference, twin=twin, error=0.02))
        assert alone.whole > 5.0
        assert chained.whole < 1.5
        assert chained.incoming == 0.02

    def test_tiny_error_handed_on_widens_next_to_nothing(
        self, reference: torch.Tensor, twin: torch.Tensor
    ) -> None:
        target = 1.05 * reference.float()
        alone = noise_ratio(rows_with(target, reference=reference, twin=twin))
        chained = noise_ratio(rows_with(target, reference=reference, twin=twin, error=1e-5))
        assert chained.whole == pytest.approx(alone.whole, rel=1e-3)

    def test_token_that_was_upset_before_is_forgiven_alone(self) -> None:
        exact = random(TOKENS, CHANNELS, seed=0)
        reference, target = exact.bfloat16(), exact.bfloat16().float()
        handed = reference.float()
        handed[4] += 0.5 * random(CHANNELS, seed=2)
        input_error = measure_input_error(reference, handed)
        for token, is_forgiven in ((4, True), (5, False)):
            upset = target.clone()
            upset[token] += 0.5 * random(CHANNELS, seed=3)
            rows = rows_with(upset, reference=reference, twin=exact)
            noise = noise_ratio(
                Rows(
                    reference=reference,
                    target=upset,
                    massive=rows.massive,
                    places=rows.places,
                    twin=exact,
                    input_error=input_error,
                )
            )
            assert (noise.token_worst < 2.0) == is_forgiven


class TestIncoming:
    def test_error_is_relative_to_what_the_golden_was_fed(self) -> None:
        fed = random(TOKENS, CHANNELS, seed=0)
        input_error = measure_input_error(fed, 1.01 * fed)
        assert input_error.overall == pytest.approx(0.01, rel=1e-4)
        assert input_error.tokens.tolist() == pytest.approx([0.01] * TOKENS, rel=1e-4)
        assert input_error.is_finite

    def test_massive_channels_do_not_hide_the_error_of_the_rest(self, twin: torch.Tensor) -> None:
        handed = twin.clone()
        handed[:, :MASSIVE] *= 1.1
        whole = float((handed - twin).norm() / twin.norm())
        assert measure_input_error(twin, handed).overall > 2 * whole

    def test_each_token_has_its_own_error_and_suffers_from_the_others(self) -> None:
        fed = random(TOKENS, CHANNELS, seed=0)
        handed = fed.clone()
        handed[4] *= 1.5
        input_error = measure_input_error(fed, handed)
        assert float(input_error.tokens[4]) == pytest.approx(0.5, rel=1e-4)
        assert float(input_error.tokens[5]) == 0.0
        assert float(input_error.inherited[5]) == input_error.overall > 0.0
        assert input_error.select(torch.arange(TOKENS) == 4).inherited.tolist() == pytest.approx(
            [0.5], rel=1e-4
        )

    def test_same_input_has_no_error(self) -> None:
        fed = random(TOKENS, CHANNELS, seed=0)
        assert measure_input_error(fed, fed.clone()).overall == 0.0

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_nan_and_infinity_are_told(self, bad: float) -> None:
        fed = random(TOKENS, CHANNELS, seed=0)
        handed = fed.clone()
        handed[0, 0] = bad
        assert not measure_input_error(fed, handed).is_finite


def test_averages_of_few_channels_are_told_by_token_alone() -> None:
    twin = random(TOKENS, 2, seed=0).float()
    golden, port = (twin * (1 + 2e-3 * random(TOKENS, 2, seed=seed)).float() for seed in (1, 2))
    noise = noise_ratio(rows_with(port, reference=golden, twin=twin))
    assert (noise.channel_gain, noise.channel_offset) == (None, None)
    assert noise.token_gain is not None
    assert noise.channel_worst is not None
