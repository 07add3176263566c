"""Sites: their order, their graph, and formulas that name what each is computed from."""

from __future__ import annotations

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.model.graph import ModelGraph, QkNorm, RouterScores
from minimax_tools.model.sites import SITE_INPUTS, SITE_LEVELS, ModelSite, Site, formula, parse_site


def test_there_are_18_sites_in_execution_order() -> None:
    assert " ".join(Site) == (
        "input input_norm q_proj k_proj v_proj q_norm k_norm q_rope k_rope attn_context attn_delta "
        "attn_residual post_norm router_logits router_experts router_weights moe_delta output"
    )
    assert [site.order for site in Site] == list(range(18))


def test_every_site_is_computed_from_earlier_ones_only() -> None:
    assert set(SITE_INPUTS) == set(Site)
    assert all(source.order < site.order for site, sources in SITE_INPUTS.items() for source in sources)
    assert [site for site, sources in SITE_INPUTS.items() if not sources] == [Site.INPUT]
    used = {source for sources in SITE_INPUTS.values() for source in sources}
    assert set(Site) - used == {Site.OUTPUT}


def test_levels_grow_in_execution_order() -> None:
    layer, component, everything = (SITE_LEVELS[level] for level in ("layer", "component", "all"))
    assert layer == (Site.INPUT, Site.OUTPUT)
    assert component == (
        *(Site.INPUT, Site.ATTN_DELTA, Site.ATTN_RESIDUAL, Site.POST_NORM, Site.ROUTER_LOGITS),
        *(Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS, Site.MOE_DELTA, Site.OUTPUT),
    )
    assert everything == tuple(Site)


def test_only_rotated_queries_and_keys_have_a_dim_for_heads() -> None:
    assert [site for site in Site if site.has_heads_dim] == [Site.Q_ROPE, Site.K_ROPE]
    assert not any(site.has_heads_dim for site in ModelSite)


def test_names_are_read_back() -> None:
    assert [parse_site(str(site)) for site in Site] == list(Site)
    with pytest.raises(
        UsageError, match=r"'moe' is no site of a decoder layer: expected one of input, .*, output"
    ):
        parse_site("moe")


SOFTMAX = ModelGraph(
    qk_norm=QkNorm.PER_HEAD,
    router_scores=RouterScores.SOFTMAX,
    has_float32_router=False,
    has_correction_bias=False,
    normalises_shares=False,
)


@pytest.mark.parametrize("graph", [ModelGraph(), SOFTMAX])
def test_formulas_name_the_inputs_of_all_sites(graph: ModelGraph) -> None:
    # Inputs that a formula words instead of naming.
    in_words = {
        Site.ATTN_CONTEXT: ("keys", "values", "q·k"),
        Site.ROUTER_WEIGHTS: ("router_logits", "chosen experts"),
        Site.MOE_DELTA: ("post_norm", "chosen experts", "router_weight"),
    }
    for site in Site:
        for words in in_words.get(site, SITE_INPUTS[site]):
            assert str(words) in formula(site, graph), site


@pytest.mark.parametrize(
    ("site", "words", "of_softmax"),
    [
        (Site.Q_NORM, "one mean over all N·D channels of a token,", "the D channels of each head,"),
        (Site.ROUTER_LOGITS, "gate.weightᵀ, without a bias, in float32", "gate.weightᵀ, without a bias"),
        (
            Site.ROUTER_EXPERTS,
            "the k largest of sigmoid(router_logits) + e_score_correction_bias, in float32",
            "the k largest of softmax(router_logits), in float32",
        ),
        (
            Site.ROUTER_WEIGHTS,
            "sigmoid(router_logits) of the chosen experts, without the bias, divided by their sum, in float32",
            "softmax(router_logits) of the chosen experts, not divided by their sum, in float32, then rounded",
        ),
    ],
)
def test_formulas_follow_the_graph(site: Site, words: str, of_softmax: str) -> None:
    assert words in formula(site, ModelGraph())
    assert of_softmax in formula(site, SOFTMAX)
