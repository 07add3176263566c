"""Descriptions of a port's values that are no known mistakes: a site is off by a factor.

They compete with the mistakes: where a factor explains the port, what only resembles it is no name.
"""

from __future__ import annotations

from functools import partial

from compare.diagnosis.evaluation import scaled
from compare.diagnosis.mistake import Mistake, values_of
from minimax_tools.model.sites import Site

# Sites of which the catalogue has no mistake that is a factor.
_SITES = (
    *(Site.INPUT_NORM, Site.Q_ROPE, Site.K_ROPE, Site.ATTN_CONTEXT, Site.ATTN_RESIDUAL),
    *(Site.POST_NORM, Site.ROUTER_LOGITS, Site.OUTPUT),
)

DESCRIPTIONS = tuple(
    Mistake(
        name=f"{site} scaled",
        what=f"{site} is off by a factor.",
        look_at=f"what computes {site}",
        build=partial(scaled, site),
        candidates=values_of("factor", 0.9, 1.1),
        fitted="factor",
        is_factor=True,
        is_named=False,
    )
    for site in _SITES
)
