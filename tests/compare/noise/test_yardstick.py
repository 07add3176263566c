"""A site's noise, distances in units of it, and the mean of misfits over tokens, without the worst of them."""

from __future__ import annotations

import math

import pytest
import torch

from compare.noise.yardstick import Yardstick, trimmed_mean


def yardstick(
    *, port: torch.Tensor, golden: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> Yardstick:
    variance = torch.tensor([[1.0, 4.0], [0.25, 1.0]])
    return Yardstick(port=port, golden=golden, exact=exact, variance=variance, dtype=dtype)


def test_mean_is_that_of_all_but_the_worst_fiftieth_rounded_up() -> None:
    for worst in (9.0, math.inf, math.nan):
        assert trimmed_mean(torch.tensor([1.0, worst, 3.0])) == 2.0
    for num_values, num_kept in ((1, 1), (2, 1), (50, 49), (51, 49), (100, 98), (101, 98)):
        values = torch.arange(1.0, num_values + 1).flip(0)
        assert trimmed_mean(values) == (num_kept + 1) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_value_that_is_not_finite_makes_the_mean_infinite(dtype: torch.dtype) -> None:
    for lost in (math.inf, math.nan):
        assert trimmed_mean(torch.tensor([1.0, lost, lost], dtype=dtype)) == math.inf
    assert trimmed_mean(torch.zeros(0)) == math.inf


class TestNoise:
    # Noise of a token times noise of a channel; token 3 and channel 0 happen to be exact, token 5 is not settled.
    OF_TOKEN = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0, 100.0])
    OF_CHANNEL = torch.tensor([0.0, 1.0, 2.0, 3.0, 8.0])
    EXACT = torch.full((6, 5), 7.0)
    SETTLED = torch.tensor([True, True, True, True, True, False])

    @staticmethod
    def variance(golden: torch.Tensor, exact: torch.Tensor, settled: torch.Tensor) -> torch.Tensor:
        return Yardstick.of(
            port=golden, golden=golden, exact=exact, settled=settled, dtype=torch.bfloat16
        ).variance

    def measure(self, settled: torch.Tensor) -> torch.Tensor:
        golden = self.EXACT - (self.OF_TOKEN[:, None] * self.OF_CHANNEL).sqrt()
        return self.variance(golden, self.EXACT, settled)

    def test_exact_tokens_and_channels_keep_a_thousandth_and_unsettled_tokens_are_typical(self) -> None:
        # Over settled tokens, the mean noise of a channel is twice `OF_CHANNEL`; of that, 4 is the median.
        of_channel = torch.tensor([4e-3, 2.0, 4.0, 6.0, 16.0])
        # A fifth of the channels is exact. The median token has 0.8.
        of_token = torch.tensor([0.4, 0.8, 1.2, 0.8e-3, 1.6, 0.8])
        expected = of_token[:, None] * of_channel
        torch.testing.assert_close(self.measure(self.SETTLED), expected, rtol=1e-4, atol=0.0)

    def test_all_tokens_count_where_none_is_settled(self) -> None:
        nowhere = torch.zeros_like(self.SETTLED)
        torch.testing.assert_close(self.measure(nowhere), self.measure(~nowhere))
        assert not torch.allclose(self.measure(nowhere), self.measure(self.SETTLED))

    def test_noise_is_never_zero_though_most_channels_or_tokens_are_exact(self) -> None:
        for exact in (self.EXACT, self.EXACT.T):
            of_channel, of_token = exact.clone(), exact.clone()
            of_channel[:, 0] += 1.0
            of_token[0] += 1.0
            for golden in (of_channel, of_token):
                noise = self.variance(golden, exact, torch.ones(len(exact), dtype=torch.bool))
                assert bool((noise > 0.0).all() and noise.isfinite().all())


class TestDistances:
    PORT = torch.tensor([[5.0, 5.0], [2.0, 0.0]])
    GOLDEN = torch.tensor([[3.0, 1.0], [1.0, 1.0]])
    EXACT = torch.tensor([[2.0, 2.0], [0.0, 0.0]])
    PREDICTION = torch.tensor([[4.0, 1.0], [1.0, 2.0]])

    def test_misfit_is_the_mean_square_in_units_of_noise(self) -> None:
        site = yardstick(port=self.PORT, golden=self.GOLDEN, exact=self.EXACT)
        # (1² / 1 + 4² / 4) / 2 and (1² / 0.25 + 2² / 1) / 2
        assert site.misfit(self.PREDICTION, site.variance).tolist() == [2.5, 4.0]

    def test_projection_is_of_the_ports_difference_from_the_golden(self) -> None:
        site = yardstick(port=self.PORT, golden=self.GOLDEN, exact=self.EXACT)
        projection = site.project(self.PREDICTION, site.variance)
        # Errors (2, 4) and (1, -1); predicted are (2, -1) and (1, 2).
        assert projection.product.tolist() == [4 - 1, 4 - 2]
        assert projection.predicted_energy.tolist() == [4 + 0.25, 4 + 4]
        assert projection.error_energy.tolist() == [4 + 4, 4 + 1]
        assert {values.dtype for values in projection} == {torch.float64}

    @pytest.mark.parametrize(("dtype", "relative"), [(torch.bfloat16, 6e-3), (torch.float32, 1e-6)])
    def test_larger_values_alone_change_the_noise(self, dtype: torch.dtype, relative: float) -> None:
        site = yardstick(port=self.PORT, golden=self.GOLDEN, exact=self.EXACT, dtype=dtype)
        growth = torch.tensor([10.0 / relative**2, -10.0 / relative**2])
        torch.testing.assert_close(site.widened(growth), torch.tensor([[6.0, 9.0], [0.25, 1.0]]))

    def test_some_tokens_are_selected_on_both_sides(self) -> None:
        site = yardstick(port=self.PORT, golden=self.GOLDEN, exact=self.EXACT)
        chosen = site.select_tokens(torch.tensor([1]))
        for name in ("port", "golden", "exact", "variance"):
            assert torch.equal(getattr(chosen, name), getattr(site, name)[1:])
