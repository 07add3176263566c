"""Sites: their order, their graph, and formulas that name what each is computed from."""

from __future__ import annotations

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.model.formulas import formula
from minimax_tools.model.graph import LayerGraph, ModelGraph, QkNorm, RouterScores
from minimax_tools.model.sites import SITE_LEVELS, ModelSite, Site, find_level, parse_site

_BEFORE_QK_NORMS = "input input_norm q_proj k_proj v_proj"
_ATTENTION = "q_rope k_rope attn_context attn_delta attn_residual post_norm"
_ROUTER = "router_logits router_experts router_weights"
WITH_SHARED = ModelGraph(shared_width=64, dense_layers=(0,), qk_norm=QkNorm.NONE)


@pytest.mark.parametrize(
    ("graph", "sites"),
    [
        (
            ModelGraph().layer(0),
            f"{_BEFORE_QK_NORMS} q_norm k_norm {_ATTENTION} {_ROUTER} moe_delta output",
        ),
        (
            WITH_SHARED.layer(1),
            f"{_BEFORE_QK_NORMS} {_ATTENTION} {_ROUTER} routed_delta shared_delta moe_delta output",
        ),
        (WITH_SHARED.layer(0), f"{_BEFORE_QK_NORMS} {_ATTENTION} mlp_delta output"),
    ],
    ids=["MiniMax-M2", "shared expert", "dense"],
)
class TestLayerGraph:
    def test_sites_are_in_execution_order(self, graph: LayerGraph, sites: str) -> None:
        assert " ".join(graph.sites) == sites
        assert list(graph.sites) == sorted(graph.sites, key=lambda site: site.order)

    def test_every_site_is_computed_from_earlier_ones_only(self, graph: LayerGraph, sites: str) -> None:
        inputs = graph.inputs
        assert all(source.order < site.order for site, sources in inputs.items() for source in sources)
        assert [site for site, sources in inputs.items() if not sources] == [Site.INPUT]
        used = {source for sources in inputs.values() for source in sources}
        assert set(graph.sites) - used == {Site.OUTPUT}


def test_models_with_several_kinds_of_layers_have_the_sites_of_all() -> None:
    assert set(WITH_SHARED.sites) == set(WITH_SHARED.layer(0).sites) | set(WITH_SHARED.layer(1).sites)


def test_levels_grow_in_execution_order() -> None:
    layer, component, everything = (SITE_LEVELS[level] for level in ("layer", "component", "all"))
    assert layer == (Site.INPUT, Site.OUTPUT)
    assert component == (
        *(Site.INPUT, Site.ATTN_DELTA, Site.ATTN_RESIDUAL, Site.POST_NORM, Site.ROUTER_LOGITS),
        *(Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS, Site.ROUTED_DELTA, Site.SHARED_DELTA, Site.MOE_DELTA),
        *(Site.MLP_DELTA, Site.OUTPUT),
    )
    assert everything == tuple(Site)


@pytest.mark.parametrize("graph", [ModelGraph(), WITH_SHARED], ids=["MiniMax-M2", "others"])
@pytest.mark.parametrize("level", ["layer", "component", "all"])
def test_levels_are_found_again_in_the_sites_of_any_graph(graph: ModelGraph, level: str) -> None:
    assert find_level(graph.level(level)) == level
    assert find_level((Site.INPUT, Site.Q_PROJ)) is None


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
    has_float32_shares=False,
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
    for site, inputs in graph.layer(0).inputs.items():
        for words in in_words.get(site, inputs):
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
