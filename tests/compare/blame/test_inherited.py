"""Second blames: what a failing site hands on through sites that pass is no second culprit, and what exceeds it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.blame.blame import blame_layer, is_inherited
from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import NearestLimit, NoiseRatio, RelativeError, SiteResult, SiteStatus

Judge = Callable[..., Any]
Change = Callable[[torch.Tensor], torch.Tensor]

LAYER = 1


def off(
    value: float, *, limit: float = 1.2, figure: str = "whole", status: SiteStatus = SiteStatus.PASS
) -> SiteResult:
    """A site whose error is so many times the noise floor."""
    noise = NoiseRatio(
        whole=value if figure == "whole" else 1.0,
        ordinary=1.0,
        massive=None,
        token_median=1.0,
        token_p99=value if figure == "token_p99" else 1.0,
        token_worst=1.0,
        worst_token=(0, 0),
        is_estimated=False,
        incoming=0.0,
    )
    nearest = NearestLimit(figure=figure, value=value, limit=limit)
    return SiteResult(layer=LAYER, site="attn_delta", status=status, noise=noise, nearest=nearest)


def off_without_floor(value: float, *, limit: float) -> SiteResult:
    return SiteResult(
        layer=LAYER,
        site="attn_delta",
        status=SiteStatus.PASS,
        relative=RelativeError(value=value, incoming=0.0),
        nearest=NearestLimit(figure="relative_l2", value=value, limit=limit),
    )


class TestAccount:
    def test_error_that_its_inputs_carry_is_handed_on(self) -> None:
        assert is_inherited(off(1.3), [off(1.4, limit=1.5)])

    def test_error_beyond_what_they_carry_is_its_own(self) -> None:
        # Of 1.4 times the noise, all but the noise is carried: 1.2² + 1.4² - 1 is 1.55².
        assert is_inherited(off(1.54), [off(1.4, limit=1.5)])
        assert not is_inherited(off(1.56), [off(1.4, limit=1.5)])

    def test_inputs_as_good_as_the_golden_hand_nothing_on(self) -> None:
        assert not is_inherited(off(1.21), [off(1.0), off(0.9)])

    def test_the_worst_input_counts(self) -> None:
        assert is_inherited(off(1.3), [off(1.0), off(1.4, limit=1.5)])

    def test_figures_are_held_against_the_same_figure(self) -> None:
        broken = off(2.2, limit=2.0, figure="token_p99")
        assert is_inherited(broken, [off(1.7, limit=2.0, figure="token_p99")])
        assert not is_inherited(broken, [off(1.7, limit=2.0)])

    def test_without_a_floor_all_of_an_input_s_error_may_be_handed_on(self) -> None:
        broken = off_without_floor(0.025, limit=0.02)
        assert is_inherited(broken, [off_without_floor(0.008, limit=0.01)])
        assert not is_inherited(broken, [off_without_floor(0.004, limit=0.01)])

    def test_what_fails_without_a_figure_was_not_handed_on(self) -> None:
        broken = SiteResult(layer=LAYER, site="post_norm", status=SiteStatus.FAIL, reason="3 NaN")
        assert not is_inherited(broken, [off(1.4, limit=1.5)])
        assert not is_inherited(off(1.1, status=SiteStatus.FAIL), [off(1.4, limit=1.5)])

    def test_inputs_without_figures_hand_nothing_on(self) -> None:
        chosen = SiteResult(layer=LAYER, site="router_experts", status=SiteStatus.PASS)
        assert not is_inherited(off(1.3), [chosen])
        judged = replace(chosen, nearest=NearestLimit(figure="unexplained", value=3.0, limit=1.0))
        assert not is_inherited(off(1.3), [judged])

    def test_inputs_without_the_broken_figure_hand_nothing_on(self) -> None:
        broken = replace(off(1.3), nearest=NearestLimit(figure="massive", value=1.3, limit=1.2))
        assert not is_inherited(broken, [off(1.4, limit=1.5)])


def test_reason_says_that_a_trace_does_not_account_for_the_culprit_behind_it() -> None:
    results = {
        Site.Q_ROPE: off(20.0, status=SiteStatus.FAIL),
        Site.ATTN_CONTEXT: off(1.4, limit=1.5),
        Site.ATTN_DELTA: off(1.4, limit=1.5),
        Site.ATTN_RESIDUAL: replace(off(1.3, status=SiteStatus.FAIL), reason="error 1.3×"),
        Site.POST_NORM: replace(off(7.4, status=SiteStatus.FAIL), reason="error 7.4×"),
    }
    first, second = blame_layer(results, layer=LAYER, given=(Site.Q_NORM,), is_chained=False)
    assert (first.sites, second.sites) == (("q_rope",), ("post_norm",))
    assert second.reason == "error 7.4×; attn_residual fails by too little to account for it"


def test_reason_words_several_traces() -> None:
    results = {
        Site.Q_ROPE: off(20.0, status=SiteStatus.FAIL),
        Site.ATTN_CONTEXT: off(1.4, limit=1.5),
        Site.POST_NORM: off(1.3, status=SiteStatus.FAIL),
        Site.ROUTER_WEIGHTS: off(1.3, status=SiteStatus.FAIL),
        Site.MOE_DELTA: replace(off(7.4, status=SiteStatus.FAIL), reason="error 7.4×"),
    }
    *_, last = blame_layer(results, layer=LAYER, given=(Site.Q_NORM,), is_chained=False)
    assert last.sites[-1] == "moe_delta"
    assert "post_norm, router_weights fail by too little to account for it" in last.reason


class TestCulprits:
    """The toy's golden, repeated but for errors of a size that is given in units of its noise floor."""

    @pytest.fixture
    def blamed(self, copyist: Any, judge: Judge, golden: Path) -> Callable[[Mapping[Site, float]], list[Any]]:
        capture = Capture.open(golden)

        def run(errors: Mapping[Site, float]) -> list[Any]:
            changes: dict[tuple[int | None, Site | ModelSite], Change] = {
                (LAYER, site): self._upset(capture, site, times) for site, times in errors.items()
            }
            comparison = judge(copyist.device_run(changes), pattern=f"layer_{LAYER}")
            return [blame.sites for blame in comparison.blame]

        return run

    def _upset(self, capture: Capture, site: Site, times: float) -> Change:
        """Adds noise that is so many times the floor; to the residual stream what attention adds to it."""
        if site is Site.ATTN_RESIDUAL:
            delta = self._upset(capture, Site.ATTN_DELTA, times)(capture.read(LAYER, Site.ATTN_DELTA))
            return lambda _: capture.read(LAYER, Site.INPUT) + delta
        twin = capture.read_twin(LAYER, site)
        assert twin is not None

        def change(tensor: torch.Tensor) -> torch.Tensor:
            floor = (tensor.float() - twin).square().mean().sqrt()
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(site.order))
            if site in (Site.ATTN_CONTEXT, Site.ATTN_DELTA):
                # The median token's limit is the tightest.
                noise[:, torch.arange(noise.shape[1]) % 3 != 0] = 0.0
            return (tensor.float() + times * floor * noise).to(tensor.dtype)

        return change

    def test_trace_of_a_culprit_behind_sites_that_pass_is_not_a_second_one(self, blamed: Any) -> None:
        carried = {Site.ATTN_CONTEXT: 2.3, Site.ATTN_DELTA: 2.3, Site.ATTN_RESIDUAL: 2.75}
        # Without weights, nothing tells whether the error of attn_delta, which passes, is all that the next one has.
        assert blamed(carried) == [("attn_delta", "attn_residual")]
        assert blamed({Site.Q_ROPE: 20.0, **carried}) == [("q_rope",)]

    def test_culprits_of_attention_and_experts_are_both_named(self, blamed: Any) -> None:
        strong, weak = 20.0, 1.3
        for attention, experts in ((strong, weak), (weak, strong)):
            found = blamed({Site.Q_ROPE: attention, Site.MOE_DELTA: experts})
            assert found == [("q_rope",), ("moe_delta",)]

    @pytest.mark.parametrize("carried", [1.5, 1.9], ids=["traces_pass", "traces_fail"])
    def test_culprit_among_traces_of_another_is_named_where_it_exceeds_them(
        self, carried: float, blamed: Any
    ) -> None:
        traces = dict.fromkeys((Site.ATTN_CONTEXT, Site.ATTN_DELTA, Site.ATTN_RESIDUAL), carried)
        assert blamed({Site.K_ROPE: 20.0, Site.POST_NORM: 2.0, **traces}) == [("k_rope",), ("post_norm",)]
