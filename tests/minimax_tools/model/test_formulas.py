"""Formulas of all sites: each names what its site is computed from."""

from __future__ import annotations

import pytest

from minimax_tools.model.sites import FORMULAS, SITE_INPUTS, ModelSite, Site

# Inputs that a formula words instead of naming.
_IN_WORDS = {
    Site.ATTN_CONTEXT: ("keys", "values", "q·k"),
    Site.ROUTER_WEIGHTS: ("router_logits", "chosen experts"),
    Site.MOE_DELTA: ("post_norm", "chosen experts", "router_weight"),
}


def test_every_site_has_one() -> None:
    assert set(FORMULAS) == {*Site, *ModelSite}


@pytest.mark.parametrize("site", Site)
def test_it_names_its_inputs(site: Site) -> None:
    for words in _IN_WORDS.get(site, SITE_INPUTS[site]):
        assert str(words) in FORMULAS[site]
