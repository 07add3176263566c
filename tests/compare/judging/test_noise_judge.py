from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from compare.judging.judge import (
    floorless_limit,
    judge_broken,
    judge_noise,
    judge_without_floor,
)
from compare.judging.routing import count_unflipped, judge_routing
from compare.limits.limits import (
    NOISE_FIGURES,
    RATIO_FIGURES,
    STRUCTURE_FIGURES,
    Limit,
    LimitContext,
    NoiseLimits,
    SiteLimits,
)
from compare.limits.limits_file import calibrated_limits
from minimax_tools.metrics.pair_metrics import PairMetrics, compare_tensors
from minimax_tools.results.results import NearestLimit, NoiseRatio, RelativeError, RoutingResult, SiteStatus

LIMITS = calibrated_limits()
TERMS = LimitContext(backend="cpu", is_float32=False, share=1e-6)
ELSEWHERE = replace(TERMS, backend="neuron-xla")
ONES: Any = dict.fromkeys(NOISE_FIGURES, 1.0)
CLEAN = NoiseRatio(
    **ONES, worst_token=(1, 17), is_estimated=False, incoming=0.0, worst_channel=23, is_widened=True
)


@pytest.fixture
def reference() -> torch.Tensor:
    return torch.randn(20, 30, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def metrics(reference: torch.Tensor) -> PairMetrics:
    return compare_tensors(reference, 1.001 * reference, rtol=1e-2, atol=1e-3)


def judge(
    noise: NoiseRatio, metrics: PairMetrics, *, context: LimitContext = TERMS, num_tokens: int = 200
) -> tuple[SiteStatus, str, NearestLimit]:
    (status, reason), nearest = judge_noise(
        noise, metrics, LIMITS, site="moe_delta", num_tokens=num_tokens, num_channels=256, context=context
    )
    assert nearest is not None
    return status, reason, nearest


def limit_of(figure: str, metrics: PairMetrics, *, num_tokens: int = 200) -> float:
    """Return the limit of the figure."""
    nearest = judge(replace(CLEAN, **{figure: 1e6}), metrics, num_tokens=num_tokens)[2]
    assert nearest.figure == figure
    return nearest.limit


class TestNoise:
    @pytest.mark.parametrize("figure", NOISE_FIGURES)
    def test_each_figure_is_held_to_its_limit(self, figure: str, metrics: PairMetrics) -> None:
        limit = limit_of(figure, metrics)
        for value, status in (
            (0.999 * limit, SiteStatus.PASS),
            (1.001 * limit, SiteStatus.FAIL),
            (math.inf, SiteStatus.FAIL),
            (math.nan, SiteStatus.FAIL),
        ):
            found, reason, nearest = judge(replace(CLEAN, **{figure: value}), metrics)
            assert found is status, value
            assert bool(reason) == (status is SiteStatus.FAIL)
            assert nearest.figure == figure

    @pytest.mark.parametrize("figure", ["whole", "ordinary", "token_median"])
    def test_error_as_large_as_the_floor_is_beyond_noise(self, figure: str, metrics: PairMetrics) -> None:
        assert limit_of(figure, metrics) < math.sqrt(2)

    @pytest.mark.parametrize(
        ("figure", "among"), [("token_worst", 200), ("channel_worst", 256), ("whole", 1)]
    )
    def test_worst_of_many_has_its_share_of_false_alarms(
        self, figure: str, among: int, metrics: PairMetrics
    ) -> None:
        table = LIMITS.of_ratios(is_chained=False, is_estimated=False, is_widened=True)
        limit = table.find("moe_delta", figure)
        assert limit is not None
        assert limit_of(figure, metrics) == limit.at(num_tokens=200, share=TERMS.share / among)
        if among > 1:
            assert limit_of(figure, metrics) > limit.at(num_tokens=200, share=TERMS.share)

    def test_four_times_the_noise_fails_in_a_decode_step_of_three_rows(self, metrics: PairMetrics) -> None:
        assert judge(replace(CLEAN, whole=4.0), metrics, num_tokens=3)[0] is SiteStatus.FAIL

    def test_bad_token_and_bad_channel_are_named(self, metrics: PairMetrics) -> None:
        assert "at row 1, token 17" in judge(replace(CLEAN, token_worst=99.0), metrics)[1]
        assert "in channel 23" in judge(replace(CLEAN, channel_worst=99.0), metrics)[1]

    def test_layer_that_was_handed_an_error_has_limits_of_its_own(self, metrics: PairMetrics) -> None:
        chained = replace(CLEAN, incoming=0.01)
        isolated = limit_of("whole", metrics)
        assert judge(replace(chained, whole=1.01 * isolated), metrics)[0] is SiteStatus.PASS
        assert judge(replace(chained, whole=10 * isolated), metrics)[0] is SiteStatus.FAIL

    @pytest.mark.parametrize("figure", STRUCTURE_FIGURES)
    def test_averages_only_warn_elsewhere(self, figure: str, metrics: PairMetrics) -> None:
        assert judge(replace(CLEAN, **{figure: 50.0}), metrics, context=ELSEWHERE)[0] is SiteStatus.WARN
        assert judge(replace(CLEAN, **{figure: 50.0}), metrics)[0] is SiteStatus.FAIL


class TestWithoutFloor:
    def limit(
        self, site: str, *, input_error: float = 0.0, num_tokens: int = 200, context: LimitContext = TERMS
    ) -> float:
        return floorless_limit(input_error, LIMITS, site=site, num_tokens=num_tokens, context=context)

    def test_site_is_judged_by_what_noise_usually_costs_there(self) -> None:
        limit = self.limit("moe_delta")
        for value, status in ((0.99 * limit, SiteStatus.PASS), (1.01 * limit, SiteStatus.FAIL)):
            (found, reason), nearest = judge_without_floor(
                RelativeError(value=value, incoming=0.0),
                LIMITS,
                site="moe_delta",
                num_tokens=200,
                context=TERMS,
            )
            assert found is status
            assert ("no noise floor" in reason) == (status is SiteStatus.FAIL)
            assert nearest.limit == limit
        assert self.limit("output") < limit

    def test_what_was_handed_on_to_few_tokens_excuses_no_fault(self) -> None:
        # Gate and up exchanged change moe_delta by more than half, another activation by a tenth.
        for num_tokens, most in ((1, 0.5), (4, 0.1), (16, 0.06)):
            assert self.limit("moe_delta", input_error=4e-3, num_tokens=num_tokens) < most

    def test_more_flip_among_fewer_tokens_and_behind_an_error(self) -> None:
        def share(num_tokens: int, input_error: float = 0.0) -> float:
            return count_unflipped(num_tokens, LIMITS, input_error=input_error, context=TERMS) / num_tokens

        assert share(1) == 0.0
        assert 0.5 < share(100) < share(1000) < 1.0
        assert share(1000, input_error=0.02) < share(1000)
        assert share(1000, input_error=10.0) == 0.25


class TestRouting:
    @staticmethod
    def judge(
        flipped: int, *, explained: int = 0, tokens: int = 1000, has_floor: bool = False, error: float = 0.0
    ) -> tuple[SiteStatus, str]:
        routing = RoutingResult(
            num_tokens=tokens,
            num_flipped=flipped,
            num_explained=explained,
            widest_unexplained_margin=0.031 if flipped > explained else None,
        )
        return judge_routing(routing, LIMITS, has_floor=has_floor, input_error=error, context=TERMS)

    def test_explained_flips_pass_and_an_unexplained_one_fails_with_its_margin(self) -> None:
        explained = self.judge(900, explained=900, has_floor=True)
        assert explained == (SiteStatus.PASS, "900 flips within noise")
        reason = "1 of 1000 tokens chose other experts beyond noise (widest margin 0.031)"
        assert self.judge(9, explained=8, has_floor=True) == (SiteStatus.FAIL, reason)

    def test_as_many_flips_as_chance_explains_pass_and_one_more_fails(self) -> None:
        most = int(self.judge(500)[1].rpartition("limit ")[2])
        status, told = self.judge(most)
        assert status is SiteStatus.PASS
        assert told.endswith("tokens chose other experts (no noise floor)")
        assert self.judge(most + 1)[0] is SiteStatus.FAIL
        # One of a few tokens is nobody's fault.
        assert self.judge(1, tokens=7)[0] is SiteStatus.PASS
        assert self.judge(7, tokens=7)[0] is SiteStatus.FAIL

    def test_layer_that_was_handed_an_error_may_flip_more(self) -> None:
        assert self.judge(300)[0] is SiteStatus.FAIL
        assert self.judge(300, error=0.1)[0] is SiteStatus.PASS


class TestOwnLimits:
    """Limits of one on all sites, and a slack of two on other backends."""

    @staticmethod
    def limits(*figures: str) -> NoiseLimits:
        table = SiteLimits.of({"all": {figure: Limit(usual=1.0) for figure in figures}})
        return replace(LIMITS, isolated=table, isolated_variants=None, slack=2.0, float32=0.5)

    def judge(
        self,
        noise: NoiseRatio,
        metrics: PairMetrics,
        *figures: str,
        context: LimitContext = TERMS,
        num_tokens: int = 200,
    ) -> tuple[tuple[SiteStatus, str], NearestLimit | None]:
        limits = self.limits(*figures)
        return judge_noise(
            noise, metrics, limits, site="output", num_tokens=num_tokens, num_channels=256, context=context
        )

    def test_figure_at_its_limit_passes_and_none_without_a_limit_fails(self, metrics: PairMetrics) -> None:
        assert self.judge(CLEAN, metrics, "whole")[0] == (SiteStatus.PASS, "")
        assert self.judge(replace(CLEAN, whole=99.0), metrics, "massive")[1] is not None
        assert self.judge(replace(CLEAN, whole=99.0), metrics) == ((SiteStatus.PASS, ""), None)

    def test_the_whole_error_is_named_before_the_part_furthest_off(self, metrics: PairMetrics) -> None:
        figures = ("whole", "ordinary", "token_median")
        (_, reason), nearest = self.judge(replace(CLEAN, whole=1.1, ordinary=9.0), metrics, *figures)
        assert reason == "error 1.1× the noise floor, limit 1"
        assert nearest is not None
        assert (nearest.figure, nearest.value) == ("ordinary", 9.0)
        within = replace(CLEAN, whole=0.9, ordinary=1.1, token_median=9.0)
        for names in (figures, figures[1:]):
            reason = self.judge(within, metrics, *names)[0][1]
            assert reason == "error 9× the noise floor at the median token, limit 1"

    def test_norm_is_told_beyond_two_in_a_hundred(self, reference: torch.Tensor) -> None:
        for factor, is_told in ((1.019, False), (1.021, True), (0.981, False), (0.979, True), (0.5, True)):
            metrics = compare_tensors(reference, factor * reference, rtol=1e-2, atol=1e-3)
            reason = self.judge(replace(CLEAN, whole=9.0), metrics, "whole")[0][1]
            assert reason.endswith(f", norm ×{factor:.3g}") == is_told, factor

    @pytest.mark.parametrize("num_tokens", [15, 16])
    def test_averages_are_judged_from_sixteen_tokens_on(self, num_tokens: int, metrics: PairMetrics) -> None:
        noise = replace(CLEAN, channel_gain=9.0, token_gain=5.0)
        status = self.judge(noise, metrics, "channel_gain", "whole", num_tokens=num_tokens)[0][0]
        assert status is (SiteStatus.FAIL if num_tokens == 16 else SiteStatus.PASS)

    @pytest.mark.parametrize("figure", RATIO_FIGURES)
    @pytest.mark.parametrize(("value", "status"), [(2.0, SiteStatus.WARN), (2.01, SiteStatus.FAIL)])
    def test_slack_still_warns(
        self, figure: str, value: float, status: SiteStatus, metrics: PairMetrics
    ) -> None:
        noise = replace(CLEAN, **{figure: value})
        assert self.judge(noise, metrics, figure, context=ELSEWHERE)[0][0] is status

    def test_limits_are_wider_for_other_graphs(self, metrics: PairMetrics) -> None:
        widened = replace(self.limits("whole"), other_graphs=1.25)
        for value, is_other, status in (
            (1.01, False, SiteStatus.FAIL),
            (1.25, True, SiteStatus.PASS),
            (1.26, True, SiteStatus.FAIL),
        ):
            (found, _), nearest = judge_noise(
                replace(CLEAN, whole=value),
                metrics,
                widened,
                site="output",
                num_tokens=200,
                num_channels=256,
                context=replace(TERMS, is_other_graph=is_other),
            )
            assert found is status
            assert nearest is not None
            assert nearest.limit == (1.25 if is_other else 1.0)

    def test_error_without_a_floor_is_held_to_limit_and_slack(self) -> None:
        context = replace(ELSEWHERE, is_float32=True)
        for value, status in (
            (0.5, SiteStatus.PASS),
            (0.51, SiteStatus.WARN),
            (1.0, SiteStatus.WARN),
            (1.01, SiteStatus.FAIL),
            (math.nan, SiteStatus.FAIL),
        ):
            error = RelativeError(value=value, incoming=0.0)
            judgement, nearest = judge_without_floor(
                error, self.limits(), site="output", num_tokens=9, context=context
            )
            assert judgement[0] is status, value
            assert (nearest.figure, nearest.limit) == ("relative_l2", 0.5)
            assert nearest.value == pytest.approx(value, nan_ok=True)

    def test_inherited_and_own_error_add_as_squares(self) -> None:
        table = {"all": {"relative_l2": Limit(usual=0.3), "amplification": Limit(usual=2.0)}}
        limits = replace(LIMITS, without_floor=SiteLimits.of(table), float32=0.4)
        for is_float32, expected in ((False, math.hypot(0.3, 1.0)), (True, math.hypot(0.4, 1.0))):
            context = replace(TERMS, is_float32=is_float32)
            found = floorless_limit(0.5, limits, site="output", num_tokens=9, context=context)
            assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("backend", "is_anywhere", "expected"),
    [
        ("cpu", False, (SiteStatus.FAIL, "broken")),
        ("neuron-xla", False, (SiteStatus.WARN, "broken (not measured on neuron-xla)")),
        (None, False, (SiteStatus.WARN, "broken (its backend is not known)")),
        ("neuron-xla", True, (SiteStatus.FAIL, "broken")),
        (None, True, (SiteStatus.FAIL, "broken")),
    ],
)
def test_broken_limit_warns_where_it_was_not_measured(backend: Any, is_anywhere: bool, expected: Any) -> None:
    context = replace(TERMS, backend=backend)
    assert judge_broken("broken", LIMITS, context=context, is_anywhere=is_anywhere) == expected
