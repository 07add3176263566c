from __future__ import annotations

import pytest
import torch

from compare.judging.noise_judge import judge_noise
from compare.limits.limit_context import LimitContext
from compare.limits.limits import FLOORLESS_FIGURES, NOISE_FIGURES
from compare.limits.limits_file import calibrated_limits
from minimax_tools.metrics.pair_metrics import PairMetrics, compare_tensors
from minimax_tools.model.sites import Site
from minimax_tools.results.results import NearestLimit, NoiseRatio, SiteStatus

TERMS = LimitContext(backend="cpu", is_float32=False, share=1e-6)
NOISE = NoiseRatio(
    whole=1.1,
    ordinary=1.1,
    massive=None,
    token_median=1.0,
    token_p99=1.2,
    token_worst=1.3,
    worst_token=(0, 3),
    is_estimated=False,
    incoming=0.0,
)


@pytest.fixture
def metrics() -> PairMetrics:
    reference = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    return compare_tensors(reference, 1.001 * reference, rtol=1e-2, atol=1e-3)


class TestScaled:
    def test_every_limit_is_as_much_wider(self) -> None:
        ours, twice = calibrated_limits(), calibrated_limits().scaled(2.0)
        tables = [(ours.without_floor, twice.without_floor, FLOORLESS_FIGURES)]
        for is_chained in (False, True):
            for is_estimated in (False, True):
                for is_widened in (False, True):
                    tables.append(
                        (
                            *(
                                limits.of_ratios(
                                    is_chained=is_chained, is_estimated=is_estimated, is_widened=is_widened
                                )
                                for limits in (ours, twice)
                            ),
                            NOISE_FIGURES,
                        )
                    )
        for before, after, figures in tables:
            for site in Site:
                for figure in figures:
                    limit, wider = before.find(site, figure), after.find(site, figure)
                    assert (limit is None) == (wider is None)
                    if limit is not None and wider is not None:
                        assert wider.at(num_tokens=9, share=1e-4) == pytest.approx(
                            2.0 * limit.at(num_tokens=9, share=1e-4)
                        )
        assert twice.float32 == 2.0 * ours.float32

    @pytest.mark.parametrize("side", [0.999, 1.001])
    def test_site_fails_where_its_share_of_a_limit_exceeds_the_factor(
        self, side: float, metrics: PairMetrics
    ) -> None:
        def judge(factor: float) -> tuple[SiteStatus, NearestLimit]:
            (status, _), nearest = judge_noise(
                NOISE,
                metrics,
                calibrated_limits().scaled(factor),
                site="moe_delta",
                num_tokens=200,
                num_channels=256,
                context=TERMS,
            )
            assert nearest is not None
            return status, nearest

        _, nearest = judge(1.0)
        status, scaled = judge(nearest.excess * side)
        assert scaled.excess == pytest.approx(1.0 / side)
        assert status is (SiteStatus.PASS if side > 1.0 else SiteStatus.FAIL)

    def test_factor_that_leaves_no_limit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="found 0"):
            calibrated_limits().scaled(0.0)
