"""Groups of blame: layers in which the same sites are to blame, told once."""

from __future__ import annotations

from collections.abc import Iterable

from minimax_tools.results import Blame, BlameGroup, SiteResult


def group_blame(blame: Iterable[Blame], results: Iterable[SiteResult]) -> tuple[BlameGroup, ...]:
    """Blame by the sites that it names, in the order of the first layer of each.

    Args:
        blame: Earliest layer first.
        results: Of every site, which tell where within it the error lies.
    """
    where = {(result.layer, result.site): result.where for result in results}
    groups: dict[tuple[str, ...], list[Blame]] = {}
    for one in blame:
        groups.setdefault(one.sites, []).append(one)

    return tuple(
        BlameGroup(
            layers=tuple(one.layer for one in members),
            sites=sites,
            worst_layer=(worst := max(members, key=lambda one: one.excess)).layer,
            reason=worst.reason,
            where=tuple(sentence for site in sites for sentence in where.get((worst.layer, site), ())),
        )
        for sites, members in groups.items()
    )
