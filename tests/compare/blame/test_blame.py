"""Whom failing sites blame: the first ones, those that no other one excuses, and all that may hide a culprit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from compare.blame.blame import blame_layer, group_blame, is_inherited
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import Component, component_run
from minimax_tools.model.sites import Site
from minimax_tools.results.results import (
    Blame,
    NearestLimit,
    NoiseRatio,
    RelativeError,
    SiteResult,
    SiteStatus,
)

LAYER = 5
GRAPH = ModelGraph().layer(LAYER)
COMPUTED = tuple(site for site in ModelGraph().sites if site is not Site.INPUT)


def past(first: Site) -> tuple[Site, ...]:
    return tuple(site for site in COMPUTED if site.order >= first.order)


def blame(
    *failing: Site,
    hidden: tuple[Site, ...] = (),
    warning: tuple[Site, ...] = (),
    chosen: tuple[Site, ...] = (),
    computed: tuple[Site, ...] = COMPUTED,
    given: tuple[Site, ...] = (Site.INPUT,),
    is_chained: bool = False,
    inheriting: frozenset[Site] = frozenset(),
) -> str:
    """Whom the results blame, in words, if all other sites pass; `chosen` were judged with the port's own choice."""

    def status(site: Site) -> SiteStatus:
        if site in hidden:
            return SiteStatus.NOT_EXPOSED
        if site in failing:
            return SiteStatus.FAIL
        return SiteStatus.WARN if site in warning else SiteStatus.PASS

    routing: Any = "routing"
    results = {
        site: SiteResult(
            layer=LAYER,
            site=str(site),
            status=status(site),
            reason="error 9×",
            routing=routing if site in chosen else None,
        )
        for site in computed
    }
    found = blame_layer(
        results, graph=GRAPH, layer=LAYER, given=given, is_chained=is_chained, inheriting=inheriting
    )
    return word_blame(found)


def word_blame(blames: tuple[Blame, ...]) -> str:
    lines = [f"{', '.join(one.sites)}: {one.reason} [right: {', '.join(one.right)}]" for one in blames]
    return "\n".join(lines) or "nobody"


def of_component(component: Component, *failing: Site, hidden: tuple[Site, ...] = ()) -> str:
    run = component_run(LAYER, component)
    return blame(*failing, hidden=hidden, computed=run.computed_sites, given=run.fed_sites)


def test_blame_reads_as_its_golden_text(expect_text: Callable[..., None]) -> None:
    norm, logits, experts, weights = (
        Site.POST_NORM,
        Site.ROUTER_LOGITS,
        Site.ROUTER_EXPERTS,
        Site.ROUTER_WEIGHTS,
    )
    attention, moe, output = Site.ATTN_DELTA, Site.MOE_DELTA, Site.OUTPUT
    first_norm, choice = Site.INPUT_NORM, (experts,)
    queries = (Site.Q_PROJ, Site.Q_NORM, Site.Q_ROPE, *past(Site.ATTN_CONTEXT))
    first = {
        "nobody where all passes": blame(),
        "nobody where a site warns": blame(warning=(Site.Q_PROJ,)),
        **{
            f"the first failing site, {site}, and not what follows": blame(*past(site))
            for site in (first_norm, Site.ATTN_CONTEXT, moe, output)
        },
        "a site that fails below a passing one too": blame(Site.Q_PROJ, output),
        "a warning upstream does not take the blame": blame(moe, warning=(norm,)),
        "an input that warns is not called right": blame(logits, warning=(norm,)),
        "an onset says what to run": blame(moe, is_chained=True),
    }
    independent = {
        "both culprits, in execution order": blame(Site.V_PROJ, Site.K_NORM, *past(Site.ATTN_CONTEXT)),
        "attention and experts": blame(attention, moe),
        "attention alone where the experts are right on what they were fed": blame(
            attention, moe, inheriting=frozenset({moe})
        ),
        "a wrong router excuses the experts": blame(experts, weights, moe, output),
        "but not experts that were judged with its choice": blame(experts, moe, chosen=choice),
        "a wrong choice excuses experts": blame(experts, moe),
        "experts that were judged with a right choice": blame(moe, chosen=choice),
    }
    hidden = {
        "somewhere between": blame(*past(attention), hidden=(Site.ATTN_CONTEXT, Site.K_ROPE)),
        "the output alone is shown": blame(output, hidden=COMPUTED[:-1]),
        "a hidden site whose other product passes is not suspected": blame(*queries, hidden=(first_norm,)),
        "a hidden norm is right where the router passes": blame(moe, output, hidden=(norm,)),
        "and suspected where the router fails": blame(logits, moe, hidden=(norm,)),
        "a hidden site whose products all fail": blame(*past(Site.Q_PROJ), hidden=(first_norm,)),
        "a norm that passes does not acquit what it may have rescaled": blame(
            Site.V_PROJ, Site.ATTN_CONTEXT, hidden=(first_norm, Site.Q_PROJ, Site.K_PROJ)
        ),
        "a residual that passes does not acquit the delta it hides": blame(
            norm, hidden=(attention, Site.ATTN_RESIDUAL)
        ),
        "sites that the run did not declare are looked through": blame(
            moe, output, computed=(attention, moe, output)
        ),
    }
    fed = {
        **{
            f"nothing beyond the border of {component}": of_component(component, moe)
            for component in (Component.MOE, Component.EXPERTS)
        },
        "a component with hidden sites": of_component(Component.MOE, moe, hidden=(logits, experts, weights)),
        "an input that nothing vouches for": blame(first_norm, given=()),
    }
    expect_text("blame.txt", {**first, **independent, **hidden, **fed, **_traces()})


def _traces() -> dict[str, str]:
    """Blame where sites between two failing ones pass, and hand on a part of the first one's error."""

    def failing(value: float) -> SiteResult:
        return replace(off(value, status=SiteStatus.FAIL), reason=f"error {value}×")

    one = {
        Site.Q_ROPE: failing(20.0),
        Site.ATTN_CONTEXT: off(1.4, limit=1.5),
        Site.ATTN_DELTA: off(1.4, limit=1.5),
        Site.ATTN_RESIDUAL: failing(1.3),
        Site.POST_NORM: failing(7.4),
    }
    several = {
        **{site: one[site] for site in (Site.Q_ROPE, Site.ATTN_CONTEXT)},
        Site.POST_NORM: failing(1.3),
        Site.ROUTER_WEIGHTS: failing(1.3),
        Site.MOE_DELTA: failing(7.4),
    }
    return {
        title: word_blame(
            blame_layer(results, graph=GRAPH, layer=LAYER, given=(Site.Q_NORM,), is_chained=False)
        )
        for title, results in (
            ("a trace does not account for the culprit behind it", one),
            ("several traces do not", several),
        )
    }


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


TRACE, LATE = off(1.4, limit=1.5), off(2.2, limit=2.0, figure="token_p99")
CHOSEN = SiteResult(layer=LAYER, site="router_experts", status=SiteStatus.PASS)
UNEXPLAINED = replace(CHOSEN, nearest=NearestLimit(figure="unexplained", value=3.0, limit=1.0))
MASSIVE = replace(off(1.3), nearest=NearestLimit(figure="massive", value=1.3, limit=1.2))
NAN = SiteResult(layer=LAYER, site="post_norm", status=SiteStatus.FAIL, reason="3 NaN")


@pytest.mark.parametrize(
    ("broken", "inputs", "inherits"),
    [
        pytest.param(off(1.3), [TRACE], True, id="carried by an input"),
        # Of 1.4 times the noise, all but the noise is carried: 1.2² + 1.4² - 1 is 1.55².
        pytest.param(off(1.54), [TRACE], True, id="just carried"),
        pytest.param(off(1.56), [TRACE], False, id="beyond what is carried"),
        pytest.param(off(1.21), [off(1.0), off(0.9)], False, id="inputs as good as the golden"),
        pytest.param(off(1.3), [off(1.0), TRACE], True, id="the worst input counts"),
        pytest.param(LATE, [off(1.7, limit=2.0, figure="token_p99")], True, id="the same figure"),
        pytest.param(LATE, [off(1.7, limit=2.0)], False, id="another figure"),
        # Without a floor, all of an input's error may be handed on.
        pytest.param(
            off_without_floor(0.025, limit=0.02), [off_without_floor(0.008, limit=0.01)], True, id="no floor"
        ),
        pytest.param(
            off_without_floor(0.025, limit=0.02),
            [off_without_floor(0.004, limit=0.01)],
            False,
            id="too little",
        ),
        pytest.param(NAN, [TRACE], False, id="a failure without a figure"),
        pytest.param(off(1.1, status=SiteStatus.FAIL), [TRACE], False, id="a failure within its limit"),
        pytest.param(off(1.3), [CHOSEN], False, id="an input without a figure"),
        pytest.param(off(1.3), [UNEXPLAINED], False, id="an input with a figure that is no ratio"),
        pytest.param(MASSIVE, [TRACE], False, id="an input without the broken figure"),
    ],
)
def test_error_is_inherited_if_inputs_carry_it(
    broken: SiteResult, inputs: list[SiteResult], inherits: bool
) -> None:
    assert is_inherited(broken, inputs) is inherits


class TestGroups:
    @staticmethod
    def blame(layer: int | None, *sites: str, **parts: Any) -> Blame:
        return Blame(layer=layer, sites=sites, reason=f"error of layer {layer}", **parts)

    @staticmethod
    def result(layer: int, excess: float | None, site: str = "moe_delta", **parts: Any) -> SiteResult:
        nearest = None if excess is None else NearestLimit(figure="whole", value=1.3 * excess, limit=1.3)
        return SiteResult(layer=layer, site=site, status=SiteStatus.FAIL, nearest=nearest, **parts)

    @pytest.mark.parametrize(
        "results",
        [
            pytest.param([(3, 2.0), (4, 9.0), (5, 3.0)], id="of the largest error"),
            # NaN has no excess over a limit.
            pytest.param([(3, 2.0), (4, None), (5, 9.0)], id="that fails without a figure"),
            # Judged twice, the second time without the error that it was handed.
            pytest.param(
                [(3, 90.0), (4, 9.0), (5, 1.0), (3, 2.0), (4, 5.0)], id="by what the blame rests on"
            ),
        ],
    )
    def test_layers_with_the_same_sites_share_a_group_that_tells_of_the_worst(
        self, results: list[tuple[int, float | None]]
    ) -> None:
        blamed = [self.blame(layer, "moe_delta") for layer in (3, 4, 5)]
        (group,) = group_blame(blamed, [self.result(layer, excess) for layer, excess in results])
        assert (group.layers, group.sites) == ((3, 4, 5), ("moe_delta",))
        assert (group.worst_layer, group.reason) == (4, "error of layer 4")

    def test_other_sites_make_other_groups_in_the_order_of_their_first_layer(self) -> None:
        places: list[tuple[int | None, str]] = [
            *((0, "q_norm"), (1, "k_rope"), (1, "moe_delta"), (2, "q_norm"), (None, "logits"))
        ]
        # A set of suspects is not the site among them.
        blamed = [*(self.blame(layer, site) for layer, site in places), self.blame(3, "q_proj", "q_norm")]
        found = [(group.layers, group.sites) for group in group_blame(blamed, [])]
        assert found == [
            ((0, 2), ("q_norm",)),
            ((1,), ("k_rope",)),
            ((1,), ("moe_delta",)),
            ((None,), ("logits",)),
            ((3,), ("q_proj", "q_norm")),
        ]

    def test_sentences_name_their_site_where_a_cause_has_several(self) -> None:
        sites = ("q_rope", "k_rope")
        blamed = [self.blame(0, site, operation="rotary embedding") for site in sites]
        results = [self.result(0, 9.0, site, where=("all tokens",)) for site in sites]
        (group,) = group_blame(blamed, results)
        assert group.where == ("q_rope: all tokens", "k_rope: all tokens")
        assert group.operation == "rotary embedding"
        (alone,) = group_blame(blamed[:1], results)
        assert (alone.where, alone.operation) == (("all tokens",), "")
