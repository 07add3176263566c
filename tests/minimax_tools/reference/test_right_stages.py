"""The sites that are replaced for a mistake."""

from __future__ import annotations

from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.right_stages import cut_behind, sites_behind, waves

GRAPH = ModelGraph().layer(0)
ALL = frozenset(ModelGraph().sites) - {Site.INPUT, Site.OUTPUT}


def test_a_site_that_is_shown_is_replaced_itself() -> None:
    assert cut_behind(GRAPH, [Site.Q_NORM], replaceable=ALL) == (Site.Q_NORM,)


def test_a_site_that_is_not_shown_gives_its_place_to_its_readers() -> None:
    assert cut_behind(GRAPH, [Site.Q_NORM], replaceable={Site.ATTN_CONTEXT}) == (Site.ATTN_CONTEXT,)
    assert cut_behind(GRAPH, [Site.ROUTER_LOGITS], replaceable={Site.MOE_DELTA}) == (Site.MOE_DELTA,)


def test_a_black_box_leaves_the_output_alone() -> None:
    assert cut_behind(GRAPH, [Site.MOE_DELTA], replaceable=()) == (Site.OUTPUT,)
    # The residual passes the experts by.
    assert cut_behind(GRAPH, [Site.ATTN_RESIDUAL], replaceable={Site.MOE_DELTA}) == (
        Site.MOE_DELTA,
        Site.OUTPUT,
    )


def test_sites_behind_follow_from_the_given_ones() -> None:
    assert sites_behind(GRAPH, [Site.MOE_DELTA]) == {Site.OUTPUT}
    assert Site.V_PROJ not in sites_behind(GRAPH, [Site.Q_PROJ])


def test_sites_of_one_wave_do_not_follow_from_each_other() -> None:
    norms = (Site.INPUT_NORM, Site.Q_NORM, Site.K_NORM, Site.POST_NORM)
    assert waves(GRAPH, norms) == ((Site.INPUT_NORM,), (Site.Q_NORM, Site.K_NORM), (Site.POST_NORM,))
