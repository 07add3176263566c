from __future__ import annotations

from compare.groups import group_blame
from minimax_tools.results import Blame, SiteResult, SiteStatus


def blame(layer: int | None, *sites: str, excess: float = 1.5) -> Blame:
    return Blame(layer=layer, sites=sites, reason=f"error of layer {layer}", excess=excess)


def test_layers_with_the_same_sites_share_a_group_that_tells_of_the_worst() -> None:
    found = group_blame(
        [blame(layer, "moe_delta", excess=excess) for layer, excess in ((3, 2.0), (4, 9.0), (5, 3.0))],
        [],
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


def test_no_blame_no_group() -> None:
    assert group_blame([], [SiteResult(layer=0, site="q_norm", status=SiteStatus.PASS)]) == ()
