from __future__ import annotations

from dataclasses import replace

from compare.blame.blame import group_blame
from minimax_tools.results.results import Blame, NearestLimit, SiteResult, SiteStatus


def blame(layer: int | None, *sites: str) -> Blame:
    return Blame(layer=layer, sites=sites, reason=f"error of layer {layer}")


def result(layer: int, site: str, excess: float) -> SiteResult:
    nearest = NearestLimit(figure="whole", value=1.3 * excess, limit=1.3)
    return SiteResult(layer=layer, site=site, status=SiteStatus.FAIL, nearest=nearest)


def test_layers_with_the_same_sites_share_a_group_that_tells_of_the_worst() -> None:
    found = group_blame(
        [blame(layer, "moe_delta") for layer in (3, 4, 5)],
        [result(3, "moe_delta", 2.0), result(4, "moe_delta", 9.0), result(5, "moe_delta", 3.0)],
    )
    (group,) = found
    assert (group.layers, group.sites) == ((3, 4, 5), ("moe_delta",))
    assert (group.worst_layer, group.reason) == (4, "error of layer 4")


def test_other_sites_make_other_groups_in_the_order_of_their_first_layer() -> None:
    found = group_blame(
        [
            blame(0, "q_norm"),
            blame(1, "k_rope"),
            blame(1, "moe_delta"),
            blame(2, "q_norm"),
            blame(None, "logits"),
        ],
        [],
    )
    assert [(group.layers, group.sites) for group in found] == [
        ((0, 2), ("q_norm",)),
        ((1,), ("k_rope",)),
        ((1,), ("moe_delta",)),
        ((None,), ("logits",)),
    ]


def test_set_of_suspects_is_not_the_site_among_them() -> None:
    found = group_blame([blame(0, "q_norm"), blame(1, "q_proj", "q_norm")], [])
    assert len(found) == 2


def test_layer_that_fails_without_a_figure_is_the_worst() -> None:
    """NaN has no excess over a limit."""
    nan = SiteResult(layer=3, site="moe_delta", status=SiteStatus.FAIL, reason="256 NaN or Inf")
    (group,) = group_blame(
        [blame(layer, "moe_delta") for layer in (2, 3, 5)],
        [result(2, "moe_delta", 2.0), nan, result(5, "moe_delta", 9.0)],
    )
    assert (group.worst_layer, group.reason) == (3, "error of layer 3")


def test_worst_layer_is_told_by_what_the_blame_rests_on() -> None:
    """A site that was judged twice, the second time without the error that it was handed."""
    (group,) = group_blame(
        [blame(layer, "moe_delta") for layer in (3, 4)],
        [
            *(result(layer, "moe_delta", excess) for layer, excess in ((3, 90.0), (4, 9.0))),
            *(result(layer, "moe_delta", excess) for layer, excess in ((3, 2.0), (4, 5.0))),
        ],
    )
    assert group.worst_layer == 4


def test_sentences_name_their_site_where_a_cause_has_several() -> None:
    blamed = [replace(blame(0, site), operation="rotary embedding") for site in ("q_rope", "k_rope")]
    results = [replace(result(0, site, 9.0), where=("all tokens",)) for site in ("q_rope", "k_rope")]
    (group,) = group_blame(blamed, results)
    assert group.where == ("q_rope: all tokens", "k_rope: all tokens")
    assert group.operation == "rotary embedding"
    (alone,) = group_blame(blamed[:1], results)
    assert (alone.where, alone.operation) == (("all tokens",), "")
