"""Uncompared: sites of a comparison that were not compared, grouped by status and reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minimax_tools.errors import format_count
from minimax_tools.results.results import Comparison, SiteStatus
from reports.wording import word_sites_by_layer

_TITLES = {
    SiteStatus.NOT_EXPOSED: "Not exposed by the port",
    SiteStatus.NOT_CAPTURED: "Not captured by the golden",
    SiteStatus.NOT_JUDGED: "Not judged",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UncomparedGroup:
    """Sites that were not compared for one reason."""

    title: str
    reason: str  # empty if the title says it all
    places: tuple[str, ...]  # such as `layers 0-7: q_rope, k_rope`


def group_uncompared(comparison: Comparison) -> tuple[UncomparedGroup, ...]:
    """Return the sites that were not compared, in the order of `_TITLES`; () if all were."""
    return tuple(_groups(comparison))


def _groups(comparison: Comparison) -> Iterator[UncomparedGroup]:
    for status, title in _TITLES.items():
        sites = [site for site in comparison.sites if site.status is status]
        for reason in dict.fromkeys(site.reason for site in sites):
            alike = [site for site in sites if site.reason == reason]
            yield UncomparedGroup(
                title=f"{title}: {format_count(len(alike), 'site')}",
                reason=reason,
                places=word_sites_by_layer((site.layer, site.site) for site in alike),
            )
