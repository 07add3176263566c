from __future__ import annotations

from minimax_tools.results.results import Comparison
from reports.page.evidence import group_uncompared


def test_sites_are_grouped_by_why_they_were_not_compared(unexposed: Comparison) -> None:
    groups = {group.title: group for group in group_uncompared(unexposed)}
    assert groups["Not exposed by the port: 16 sites"].places == ("layers 0-7: q_rope, k_rope",)
    captured = groups["Not captured by the golden: 4 sites"]
    assert captured.reason == "made with --sites layer"
    assert captured.places == ("layers 0-3: router_logits",)


def test_whole_comparison_leaves_nothing_out(passing: Comparison) -> None:
    assert group_uncompared(passing) == ()
