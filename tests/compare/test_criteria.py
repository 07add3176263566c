from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from compare.criteria import (
    ClassicLimits,
    NoiseLimits,
    judge_classic,
    judge_noise,
    judge_routing,
    judge_without_floor,
)
from minimax_tools.metrics import PairMetrics, compare_tensors
from minimax_tools.results import NoiseRatio, RoutingResult, SiteStatus

LIMITS = NoiseLimits()
CLEAN = NoiseRatio(
    whole=1.0,
    ordinary=1.0,
    massive=1.0,
    token_median=1.0,
    token_p99=1.0,
    token_worst=1.0,
    worst_token=(1, 17),
    is_estimated=False,
    incoming=0.0,
)


def metrics_of(target: torch.Tensor, reference: torch.Tensor) -> PairMetrics:
    return compare_tensors(reference, target, rtol=1e-2, atol=1e-3)


@pytest.fixture
def reference() -> torch.Tensor:
    return torch.randn(20, 30, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def metrics(reference: torch.Tensor) -> PairMetrics:
    return metrics_of(1.001 * reference, reference)


class TestNoise:
    def test_noise_like_the_goldens_passes_without_a_word(self, metrics: PairMetrics) -> None:
        assert judge_noise(CLEAN, metrics, LIMITS) == (SiteStatus.PASS, "")

    @pytest.mark.parametrize("figure", ["whole", "ordinary", "massive", "token_median"])
    def test_each_figure_is_held_to_both_limits(self, figure: str, metrics: PairMetrics) -> None:
        for value, status in (
            (0.99 * LIMITS.warn, SiteStatus.PASS),
            (1.01 * LIMITS.warn, SiteStatus.WARN),
            (0.99 * LIMITS.fail, SiteStatus.WARN),
            (1.01 * LIMITS.fail, SiteStatus.FAIL),
            (math.inf, SiteStatus.FAIL),
        ):
            found, reason = judge_noise(replace(CLEAN, **{figure: value}), metrics, LIMITS)
            assert found is status, value
            assert bool(reason) == (status is not SiteStatus.PASS)

    def test_failure_says_how_much_and_what_was_allowed(self, metrics: PairMetrics) -> None:
        _, reason = judge_noise(replace(CLEAN, whole=54.3), metrics, LIMITS)
        assert reason == f"error 54.3× the noise floor, limit {LIMITS.fail:g}"

    def test_failure_of_scale_says_so(self, reference: torch.Tensor) -> None:
        noise = replace(CLEAN, whole=54.3)
        assert judge_noise(noise, metrics_of(0.5 * reference, reference), LIMITS)[1].endswith(", norm ×0.5")

    def test_one_bad_token_fails_and_is_named(self, metrics: PairMetrics) -> None:
        bad = replace(CLEAN, token_worst=1.01 * LIMITS.token_fail)
        status, reason = judge_noise(bad, metrics, LIMITS)
        assert status is SiteStatus.FAIL
        assert "at row 1, position 17" in reason
        almost = replace(CLEAN, token_worst=0.99 * LIMITS.token_fail)
        assert judge_noise(almost, metrics, LIMITS)[0] is SiteStatus.PASS

    def test_layer_that_was_handed_an_error_has_a_limit_of_its_own(self, metrics: PairMetrics) -> None:
        chained = replace(CLEAN, incoming=0.01, token_worst=100 * LIMITS.token_fail)
        below = replace(chained, whole=0.99 * LIMITS.chained_fail)
        assert judge_noise(below, metrics, LIMITS)[0] is SiteStatus.PASS
        above = replace(chained, whole=1.01 * LIMITS.chained_fail)
        assert judge_noise(above, metrics, LIMITS)[0] is SiteStatus.FAIL

    def test_golden_without_a_floor_is_judged_by_relative_error(self, reference: torch.Tensor) -> None:
        limit = LIMITS.relative_l2
        inside, outside = (metrics_of((1 + factor * limit) * reference, reference) for factor in (0.9, 1.1))
        assert judge_without_floor(inside, limit) == (SiteStatus.PASS, "")
        status, reason = judge_without_floor(outside, limit)
        assert status is SiteStatus.FAIL
        assert "no noise floor" in reason


class TestRouting:
    @staticmethod
    def routing(flipped: int, *, explained: int = 0, tokens: int = 1000) -> RoutingResult:
        return RoutingResult(
            num_tokens=tokens,
            num_flipped=flipped,
            num_explained=explained,
            widest_unexplained_margin=0.031 if flipped > explained else None,
        )

    def test_no_flip_passes(self) -> None:
        assert judge_routing(self.routing(0), LIMITS, has_floor=True) == (SiteStatus.PASS, "")
        assert judge_routing(self.routing(0), LIMITS, has_floor=False) == (SiteStatus.PASS, "")

    def test_explained_flips_pass_and_are_told(self) -> None:
        judgement = judge_routing(self.routing(900, explained=900), LIMITS, has_floor=True)
        assert judgement == (SiteStatus.PASS, "900 flips within noise")

    def test_one_unexplained_flip_fails_and_its_margin_is_told(self) -> None:
        status, reason = judge_routing(self.routing(9, explained=8), LIMITS, has_floor=True)
        assert status is SiteStatus.FAIL
        assert reason == "1 of 1000 tokens chose other experts beyond noise (widest margin 0.031)"

    def test_without_a_floor_few_flips_pass_and_many_fail(self) -> None:
        few, many = (int(share * LIMITS.flipped_share * 1000) for share in (0.9, 1.2))
        status, reason = judge_routing(self.routing(few), LIMITS, has_floor=False)
        assert status is SiteStatus.PASS
        assert "no noise floor" in reason
        assert judge_routing(self.routing(many), LIMITS, has_floor=False)[0] is SiteStatus.FAIL


class TestClassic:
    def test_limits_are_the_five_of_the_seeds(self) -> None:
        assert ClassicLimits() == ClassicLimits(
            max_abs_diff=0.01,
            mean_abs_diff=0.001,
            close_fraction=0.95,
            cosine_similarity=0.99,
            pearson_correlation=0.99,
        )

    def test_small_difference_breaks_no_limit(self, reference: torch.Tensor) -> None:
        failures = ClassicLimits().failures(metrics_of(reference + 5e-4, reference))
        assert failures == ()
        assert judge_classic(failures) == (SiteStatus.PASS, "")

    def test_each_limit_can_be_broken(self, reference: torch.Tensor) -> None:
        failures = ClassicLimits().failures(metrics_of(reference.flip(0), reference))
        assert [failure.split(" ")[0] for failure in failures] == [
            "max_abs_diff",
            "mean_abs_diff",
            "close_fraction",
            "cosine_similarity",
            "pearson_correlation",
        ]
        assert judge_classic(failures) == (SiteStatus.FAIL, "; ".join(failures))

    def test_one_far_element_breaks_the_maximum_alone(self, reference: torch.Tensor) -> None:
        target = reference.clone()
        target[3, 4] += 0.02
        (failure,) = ClassicLimits().failures(metrics_of(target, reference))
        assert failure == "max_abs_diff 0.02 > 0.01"

    def test_scale_keeps_cosine_and_pearson(self, reference: torch.Tensor) -> None:
        failures = " ".join(ClassicLimits().failures(metrics_of(0.5 * reference, reference)))
        assert "cosine" not in failures
        assert "pearson" not in failures
        assert "mean_abs_diff" in failures

    def test_zeros_for_tiny_numbers_have_no_direction_and_fail(self) -> None:
        reference = 1e-4 * torch.ones(8).cumsum(0)
        failures = ClassicLimits().failures(metrics_of(torch.zeros(8), reference))
        assert failures == ("cosine_similarity is not defined", "pearson_correlation is not defined")
        assert ClassicLimits().failures(metrics_of(torch.zeros(8), torch.zeros(8))) == ()

    def test_nan_fails_however_rare(self) -> None:
        reference = torch.linspace(-1.0, 1.0, 1000)
        target = reference.clone()
        target[7] = math.nan
        assert ClassicLimits().failures(metrics_of(target, reference)) == ("1 elements are not finite",)
