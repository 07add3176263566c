from __future__ import annotations

import math

import pytest
import torch

from compare.limits.criteria import ClassicLimits, judge_classic, layers_without_output
from minimax_tools.metrics.pair_metrics import PairMetrics, compare_tensors
from minimax_tools.results.results import SiteResult, SiteStatus


def metrics_of(target: torch.Tensor, reference: torch.Tensor) -> PairMetrics:
    return compare_tensors(reference, target, rtol=1e-2, atol=1e-3)


def judged(metrics: PairMetrics, *, layer: int | None = 3, site: str = "output") -> SiteResult:
    return SiteResult(
        layer=layer,
        site=site,
        status=SiteStatus.FAIL,
        metrics=metrics,
        classic_failures=ClassicLimits().failures(metrics),
    )


@pytest.fixture
def reference() -> torch.Tensor:
    return torch.randn(20, 30, generator=torch.Generator().manual_seed(0))


class TestClassic:
    def test_limits_are_the_five_of_the_seeds(self) -> None:
        assert ClassicLimits() == ClassicLimits(
            max_abs_diff=0.01,
            mean_abs_diff=0.001,
            close_fraction=0.95,
            cosine_similarity=0.99,
            pearson_correlation=0.99,
        )

    def test_small_difference_breaks_no_limit_and_a_large_one_each(self, reference: torch.Tensor) -> None:
        result = judged(metrics_of(reference + 5e-4, reference))
        assert (result.classic_failures, judge_classic(result)) == ((), (SiteStatus.PASS, ""))
        result = judged(metrics_of(reference.flip(0), reference))
        figures = ["max_abs_diff", "mean_abs_diff", "close_fraction"]
        figures += ["cosine_similarity", "pearson_correlation"]
        assert [failure.split(" ")[0] for failure in result.classic_failures] == figures
        assert judge_classic(result) == (SiteStatus.FAIL, "; ".join(result.classic_failures))

    def test_one_far_element_breaks_the_maximum_alone(self, reference: torch.Tensor) -> None:
        target = reference.clone()
        target[3, 4] += 0.02
        (failure,) = ClassicLimits().failures(metrics_of(target, reference))
        assert failure == "max_abs_diff 0.02 > 0.01"

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


def test_layers_without_a_compared_output_are_told() -> None:
    found = [
        SiteResult(layer=layer, site=site, status=status)
        for layer, site, status in (
            (4, "moe_delta", SiteStatus.PASS),
            (3, "output", SiteStatus.NOT_EXPOSED),
            (2, "output", SiteStatus.FAIL),
            (2, "moe_delta", SiteStatus.NOT_EXPOSED),
            (None, "logits", SiteStatus.PASS),
        )
    ]
    assert layers_without_output(found) == (3, 4)


def test_a_figure_at_its_limit_passes(reference: torch.Tensor) -> None:
    metrics = metrics_of(reference + 0.005, reference)
    exact = ClassicLimits(
        max_abs_diff=metrics.max_abs_diff,
        mean_abs_diff=metrics.mean_abs_diff,
        close_fraction=metrics.close_fraction,
    )
    assert exact.failures(metrics) == ()
