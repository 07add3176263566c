"""Groups of blame: layers in which the same sites are to blame, told once."""

from __future__ import annotations

from collections.abc import Iterable

from minimax_tools.results.results import Blame, BlameGroup, SiteResult


def group_blame(blame: Iterable[Blame], grounds: Iterable[SiteResult]) -> tuple[BlameGroup, ...]:
    """Blame by the sites that it names, in the order of the first layer of each.

    Args:
        blame: Earliest layer first.
        grounds: What it rests on: results, which tell where it is worst; of a site that was judged twice the last.
    """
    by_site = {(result.layer, result.site): result for result in grounds}
    groups: dict[tuple[str, ...], list[Blame]] = {}
    for one in blame:
        groups.setdefault(one.sites, []).append(one)

    def rests_on(one: Blame) -> list[SiteResult]:
        return [by_site[one.layer, site] for site in one.sites if (one.layer, site) in by_site]

    def badness(one: Blame) -> float:
        return max((result.nearest.excess for result in rests_on(one) if result.nearest), default=0.0)

    return tuple(
        BlameGroup(
            layers=tuple(one.layer for one in members),
            sites=sites,
            worst_layer=(worst := max(members, key=badness)).layer,
            reason=worst.reason,
            where=tuple(sentence for result in rests_on(worst) for sentence in result.where),
        )
        for sites, members in groups.items()
    )
