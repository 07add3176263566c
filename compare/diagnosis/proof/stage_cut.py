"""Stage cut: the sites at which what a port gives is replaced, so that a mistake shows no further on."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from minimax_tools.model.sites import SITE_INPUTS, Site


def readers_of(site: Site) -> tuple[Site, ...]:
    """Return the sites that are computed from a site, in execution order."""
    return tuple(reader for reader, inputs in SITE_INPUTS.items() if site in inputs)


def sites_behind(sites: Iterable[Site]) -> frozenset[Site]:
    """Return all sites that follow from these, without those that do not follow from another of them."""
    behind: set[Site] = set()
    pending = list(sites)
    while pending:
        for reader in readers_of(pending.pop()):
            if reader not in behind:
                behind.add(reader)
                pending.append(reader)
    return frozenset(behind)


def cut_behind(sites: Iterable[Site], *, replaceable: Collection[Site]) -> tuple[Site, ...]:
    """Return the sites to replace for a mistake at `sites`, in execution order.

    A site that cannot be replaced gives its place to those that are computed from it. The layer's output ends all of
    them: it can always be replaced, and then nothing of the port follows.
    """
    cut: set[Site] = set()
    pending = list(sites)
    while pending:
        site = pending.pop()
        if site in replaceable or site is Site.OUTPUT:
            cut.add(site)
        else:
            pending += readers_of(site)
    return tuple(sorted(cut, key=lambda site: site.order))


def waves(sites: Iterable[Site]) -> tuple[tuple[Site, ...], ...]:
    """Return the sites in groups, in execution order; none follows from another of its group."""
    groups: list[list[Site]] = []
    for site in sorted(sites, key=lambda site: site.order):
        if groups and site not in sites_behind(groups[-1]):
            groups[-1].append(site)
        else:
            groups.append([site])
    return tuple(tuple(group) for group in groups)
