"""Blame: a site is to blame when it fails and everything it is computed from passes.

Unexposed sites are looked through: the nearest exposed ones stand for them, and the blame then names the
whole set that may hold the fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minimax_tools.results import Blame, SiteResult, SiteStatus
from minimax_tools.sites import SITE_INPUTS, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ancestry:
    """What a site is computed from.

    Args:
        known: Nearest sites upstream that were compared or fed.
        hidden: Sites between them and the site that nobody could see.
    """

    known: frozenset[Site]
    hidden: frozenset[Site]


def blame_layer(
    results: Mapping[Site, SiteResult], *, layer: int, fed: tuple[Site, ...], is_chained: bool
) -> tuple[Blame, ...]:
    """The sites of one layer to blame, in execution order.

    Args:
        results: Results of the declared sites.
        layer: The layer.
        fed: Sites whose values were given to the run: they are right by construction.
        is_chained: Whether the layer was fed the output of another, so that blame is only an onset.
    """
    blames = []
    for site, result in results.items():
        if result.status is SiteStatus.FAIL:
            ancestry = _ancestry(site, results, fed)
            if not any(_failed(results, upstream) for upstream in ancestry.known):
                blames.append(_blame(layer, site, result, ancestry, is_chained=is_chained))
    return tuple(blames)


def _ancestry(site: Site, results: Mapping[Site, SiteResult], fed: tuple[Site, ...]) -> _Ancestry:
    known: set[Site] = set()
    hidden: set[Site] = set()
    waiting = list(SITE_INPUTS[site])
    while waiting:
        upstream = waiting.pop()
        if upstream in fed or upstream is Site.INPUT or _compared(results, upstream):
            known.add(upstream)
        elif upstream not in hidden:
            hidden.add(upstream)
            waiting.extend(SITE_INPUTS[upstream])
    return _Ancestry(known=frozenset(known), hidden=frozenset(hidden))


def _compared(results: Mapping[Site, SiteResult], site: Site) -> bool:
    return site in results and results[site].status.is_compared


def _failed(results: Mapping[Site, SiteResult], site: Site) -> bool:
    return site in results and results[site].status is SiteStatus.FAIL


def _blame(layer: int, site: Site, result: SiteResult, ancestry: _Ancestry, *, is_chained: bool) -> Blame:
    suspects = sorted({*ancestry.hidden, site}, key=lambda suspect: suspect.order)
    passing = ", ".join(str(upstream) for upstream in sorted(ancestry.known, key=lambda known: known.order))
    reason = f"{site}: {result.reason}; {passing or 'its input'} is right"
    if ancestry.hidden:
        reason += "; the port does not expose what lies between"
    if is_chained:
        reason += f"; a chained run shows only where errors begin: run mm2-test single-layer --layer {layer} on the golden"
    return Blame(layer=layer, sites=tuple(str(suspect) for suspect in suspects), reason=reason)
