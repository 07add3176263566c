"""Second judgements: without weights, with fixed limits or of another tool's golden, there are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from compare.blame.recompute import RecomputingJudge
from minimax_tools.model.sites import Site


@pytest.mark.parametrize(
    ("sites", "has_weights", "criteria", "is_own"),
    [
        ((), True, "noise", True),
        ((Site.OUTPUT,), False, "noise", True),
        ((Site.OUTPUT,), True, "classic", True),
        ((Site.OUTPUT,), True, "noise", False),
    ],
)
def test_nothing_is_recomputed(
    sites: tuple[Site, ...], has_weights: bool, criteria: str, is_own: bool
) -> None:
    class Golden:
        known_description = "known" if is_own else None

        def sites(self, layer: int) -> tuple[Site, ...]:
            raise AssertionError(f"the sites of layer {layer} are not asked for")

    sides: Any = SimpleNamespace(
        reference=Golden(),
        target=Golden(),
        weights="weights" if has_weights else None,
        is_classic=criteria == "classic",
    )
    judge: Any = None
    with RecomputingJudge(sides, layer=1, judge=judge) as recomputing:
        assert recomputing.judge_sites(sites, failing=frozenset()) == {}
