from __future__ import annotations

from typing import Any

import pytest

from compare.blame.blame import blame_layer
from minimax_tools.model.run import BOUNDARIES, Component
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Blame, SiteResult, SiteStatus

COMPUTED = tuple(site for site in Site if site is not Site.INPUT)


def blame(
    *failing: Site,
    hidden: tuple[Site, ...] = (),
    warning: tuple[Site, ...] = (),
    computed: tuple[Site, ...] = COMPUTED,
    given: tuple[Site, ...] = (Site.INPUT,),
    is_chained: bool = False,
) -> tuple[Blame, ...]:
    """Whom the results blame, if all other sites pass."""

    def status(site: Site) -> SiteStatus:
        if site in hidden:
            return SiteStatus.NOT_EXPOSED
        if site in failing:
            return SiteStatus.FAIL
        return SiteStatus.WARN if site in warning else SiteStatus.PASS

    results = {
        site: SiteResult(layer=5, site=str(site), status=status(site), reason="error 9×") for site in computed
    }
    return blame_layer(results, layer=5, given=given, is_chained=is_chained)


def names(blames: tuple[Blame, ...]) -> list[tuple[str, ...]]:
    return [one.sites for one in blames]


def past(first: Site) -> tuple[Site, ...]:
    return tuple(site for site in COMPUTED if site.order >= first.order)


class TestFirstFailure:
    def test_nobody_is_blamed_where_all_passes(self) -> None:
        assert blame() == ()
        assert blame(warning=(Site.Q_PROJ,)) == ()

    @pytest.mark.parametrize("site", [Site.INPUT_NORM, Site.ATTN_CONTEXT, Site.MOE_DELTA, Site.OUTPUT])
    def test_first_failing_site_is_blamed_and_not_what_follows(self, site: Site) -> None:
        assert names(blame(*past(site))) == [(str(site),)]

    def test_reason_names_what_failed_and_what_is_right(self) -> None:
        (one,) = blame(Site.ATTN_DELTA, Site.ATTN_RESIDUAL)
        assert one == Blame(
            layer=5, sites=("attn_delta",), reason="error 9×; attn_context is right", right=("attn_context",)
        )
        (one,) = blame(*past(Site.ATTN_CONTEXT))
        assert one.reason.endswith("v_proj, q_rope, k_rope are right")

    def test_site_that_fails_below_a_passing_one_is_blamed_too(self) -> None:
        assert names(blame(Site.Q_PROJ, Site.OUTPUT)) == [("q_proj",), ("output",)]

    def test_warning_upstream_does_not_take_the_blame(self) -> None:
        assert names(blame(Site.MOE_DELTA, warning=(Site.POST_NORM,))) == [("moe_delta",)]

    def test_input_that_warns_is_not_called_right(self) -> None:
        (one,) = blame(Site.ROUTER_LOGITS, warning=(Site.POST_NORM,))
        assert one.reason == "error 9×; post_norm warns: error 9×"


class TestIndependentCulprits:
    def test_both_are_named_in_execution_order(self) -> None:
        assert names(blame(Site.V_PROJ, Site.K_NORM, *past(Site.ATTN_CONTEXT))) == [("v_proj",), ("k_norm",)]

    def test_attention_and_experts_are_told_apart(self) -> None:
        assert names(blame(Site.ATTN_DELTA, Site.MOE_DELTA)) == [("attn_delta",), ("moe_delta",)]

    def test_wrong_router_excuses_the_experts(self) -> None:
        assert names(blame(Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS, Site.MOE_DELTA, Site.OUTPUT)) == [
            ("router_experts",)
        ]

    @pytest.mark.parametrize(
        ("was_judged_with_choice", "status", "blamed"),
        [
            (True, SiteStatus.FAIL, [("router_experts",), ("moe_delta",)]),
            (False, SiteStatus.FAIL, [("router_experts",)]),
            (True, SiteStatus.PASS, [("moe_delta",)]),
        ],
    )
    def test_wrong_choice_does_not_excuse_experts_that_were_judged_with_it(
        self, was_judged_with_choice: bool, status: SiteStatus, blamed: list[tuple[str, ...]]
    ) -> None:
        routing: Any = "routing" if was_judged_with_choice else None
        failing = {Site.MOE_DELTA: SiteStatus.FAIL, Site.ROUTER_EXPERTS: status}
        results = {
            site: SiteResult(
                layer=5,
                site=str(site),
                status=failing.get(site, SiteStatus.PASS),
                reason="",
                routing=routing if site is Site.ROUTER_EXPERTS else None,
            )
            for site in COMPUTED
        }
        assert names(blame_layer(results, layer=5, given=(Site.INPUT,), is_chained=False)) == blamed


class TestHiddenSites:
    def test_fault_behind_hidden_sites_is_somewhere_in_between(self) -> None:
        (one,) = blame(*past(Site.ATTN_DELTA), hidden=(Site.ATTN_CONTEXT, Site.K_ROPE))
        assert one.sites == ("k_rope", "attn_context", "attn_delta")
        assert one.reason == (
            "attn_delta: error 9×; v_proj, k_norm, q_rope are right; what lies between was not compared"
        )

    def test_port_that_shows_its_output_alone_is_blamed_as_a_whole(self) -> None:
        (one,) = blame(Site.OUTPUT, hidden=tuple(site for site in COMPUTED if site is not Site.OUTPUT))
        assert one.sites == tuple(str(site) for site in COMPUTED)
        assert "input is right" in one.reason

    def test_hidden_site_whose_other_product_passes_is_not_suspected(self) -> None:
        failing = (Site.Q_PROJ, Site.Q_NORM, Site.Q_ROPE, *past(Site.ATTN_CONTEXT))
        (one,) = blame(*failing, hidden=(Site.INPUT_NORM,))
        assert one.sites == ("q_proj",)
        assert one.reason == "error 9×; input_norm is right"

    def test_hidden_norm_is_right_where_the_router_passes(self) -> None:
        (one,) = blame(Site.MOE_DELTA, Site.OUTPUT, hidden=(Site.POST_NORM,))
        assert one.sites == ("moe_delta",)
        assert one.reason == "error 9×; post_norm, router_experts, router_weights are right"

    def test_hidden_norm_is_suspected_where_the_router_fails(self) -> None:
        found = names(blame(Site.ROUTER_LOGITS, Site.MOE_DELTA, hidden=(Site.POST_NORM,)))
        assert found == [("post_norm", "router_logits"), ("post_norm", "moe_delta")]

    def test_hidden_site_is_suspected_where_all_its_products_fail(self) -> None:
        found = names(blame(*past(Site.Q_PROJ), hidden=(Site.INPUT_NORM,)))
        assert found == [("input_norm", "q_proj"), ("input_norm", "k_proj"), ("input_norm", "v_proj")]

    def test_norm_that_passes_does_not_acquit_what_it_may_have_rescaled(self) -> None:
        hidden = (Site.INPUT_NORM, Site.Q_PROJ, Site.K_PROJ)
        assert names(blame(Site.V_PROJ, Site.ATTN_CONTEXT, hidden=hidden)) == [("input_norm", "v_proj")]

    def test_residual_that_passes_does_not_acquit_the_delta_it_hides(self) -> None:
        (one,) = blame(Site.POST_NORM, hidden=(Site.ATTN_DELTA, Site.ATTN_RESIDUAL))
        assert one.sites == ("attn_delta", "attn_residual", "post_norm")

    def test_sites_that_the_run_did_not_declare_are_looked_through(self) -> None:
        computed = (Site.ATTN_DELTA, Site.MOE_DELTA, Site.OUTPUT)
        (one,) = blame(Site.MOE_DELTA, Site.OUTPUT, computed=computed)
        assert one.sites[0] == "attn_residual"
        assert one.sites[-1] == "moe_delta"
        assert "attn_delta" not in one.sites


class TestFedSites:
    @pytest.mark.parametrize("component", [Component.MOE, Component.EXPERTS])
    def test_component_run_blames_nothing_beyond_its_border(self, component: Component) -> None:
        boundary = BOUNDARIES[component]
        (one,) = blame(Site.MOE_DELTA, computed=boundary.computed, given=boundary.fed)
        assert one.sites == ("moe_delta",)
        assert "post_norm" in one.reason

    def test_component_run_with_hidden_sites_stops_at_its_border(self) -> None:
        boundary = BOUNDARIES[Component.MOE]
        hidden = (Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)
        (one,) = blame(Site.MOE_DELTA, computed=boundary.computed, given=boundary.fed, hidden=hidden)
        assert one.sites == ("router_logits", "router_experts", "router_weights", "moe_delta")

    def test_input_that_nothing_vouches_for_is_a_suspect(self) -> None:
        (one,) = blame(Site.INPUT_NORM, given=())
        assert one.sites == ("input", "input_norm")
        assert one.reason.endswith("the layer's input was not captured")


def test_chained_blame_is_an_onset_and_says_what_to_run() -> None:
    (one,) = blame(Site.MOE_DELTA, is_chained=True)
    assert one.sites == ("moe_delta",)
    assert "only where errors begin: run mm2-test single-layer --layer 5 on the golden" in one.reason
