"""Blame: a site is to blame when it fails and everything it is computed from passes.

- Sites that pass may still carry an error from further upstream. A site behind them is to blame only for more than it
  inherits (see `is_inherited`).
- A failing site that also fails when it is recomputed from the port's own values is to blame, whatever fails before it.
- Sites that were not compared are looked through to the nearest ones that were. The blame then names all sites that may
  hold the fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.results.results import Blame, BlameGroup, NearestLimit, SiteResult, SiteStatus

# Plain products of one site show any fault of it. Other operations may hide one: a norm a wrong scale, attention a
# shift, a residual add an error that is small beside the stream.
_SHOWN_BY: Mapping[Site, tuple[Site, ...]] = MappingProxyType(
    {
        Site.INPUT_NORM: (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ),
        Site.Q_NORM: (Site.Q_ROPE,),
        Site.K_NORM: (Site.K_ROPE,),
        Site.ATTN_CONTEXT: (Site.ATTN_DELTA,),
        Site.POST_NORM: (Site.ROUTER_LOGITS,),
    }
)

_NONE_RECOMPUTED: Mapping[Site, SiteResult] = MappingProxyType({})
# Judged given what the port itself chose there: a wrong choice is no excuse for it.
_JUDGED_GIVEN: Mapping[Site, Site] = MappingProxyType({Site.MOE_DELTA: Site.ROUTER_EXPERTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ancestry:
    """Inputs of a site, direct or further upstream.

    Args:
        known: Nearest sites upstream that were compared, given, or are shown right by others.
        hidden: Sites between them and the site that were not compared.
    """

    known: frozenset[Site]
    hidden: frozenset[Site]


def blame_layer(
    results: Mapping[Site, SiteResult],
    *,
    layer: int,
    given: tuple[Site, ...],
    is_chained: bool,
    recomputed: Mapping[Site, SiteResult] = _NONE_RECOMPUTED,
) -> tuple[Blame, ...]:
    """Return the sites of one layer to blame, in execution order.

    Args:
        results: Results of the declared sites.
        layer: The layer.
        given: Sites whose values were given to the layer: they are right by construction.
        is_chained: Whether the layer inherits errors, so that blame is only an onset.
        recomputed: Results of excused sites (see `excused_sites`), judged on the port's own values of their inputs.
    """
    first, excused = _sort_failures(results, given)
    blame = {
        site: _blame(layer, site, results, ancestry, is_chained=is_chained)
        for site, ancestry in first.items()
    }
    for site in excused:
        if _fails(recomputed, site):
            blame[site] = Blame(layer=layer, sites=(str(site),), reason=recomputed[site].reason)
    return tuple(blame[site] for site in _in_order(set(blame)))


def excused_sites(results: Mapping[Site, SiteResult], *, given: tuple[Site, ...]) -> tuple[Site, ...]:
    """Failing sites behind one to blame: their error may be that one's.

    Args:
        results: Results of the declared sites.
        given: Sites whose values were given to the layer.
    """
    return _sort_failures(results, given)[1]


def _sort_failures(
    results: Mapping[Site, SiteResult], given: tuple[Site, ...]
) -> tuple[dict[Site, _Ancestry], tuple[Site, ...]]:
    """Sort failing sites into first ones, with their inputs, and those that a failure before them excuses."""
    first: dict[Site, _Ancestry] = {}
    excused: list[Site] = []
    # Failing sites that show no more than they inherit.
    traces: set[Site] = set()
    for site, result in results.items():
        if result.status is not SiteStatus.FAIL:
            continue
        ancestry = _ancestry(site, results, given)
        if any(_fails(results, source) and source not in traces for source in ancestry.known):
            excused.append(site)
        elif _is_trace(site, results, ancestry):
            traces.add(site)
        else:
            first[site] = ancestry
    return first, tuple(excused)


def _is_trace(site: Site, results: Mapping[Site, SiteResult], ancestry: _Ancestry) -> bool:
    """Decide whether a site's error is merely inherited from a failure further upstream."""
    if not any(_fails(results, source) for source in _all_sources(site, results)):
        return False
    return is_inherited(results[site], [results[known] for known in ancestry.known if known in results])


def _all_sources(site: Site, results: Mapping[Site, SiteResult]) -> frozenset[Site]:
    """Return every site that a site is computed from, however far upstream."""
    found: set[Site] = set()
    waiting = list(_inputs(site, results))
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            waiting.extend(_inputs(source, results))
    return frozenset(found)


def _ancestry(site: Site, results: Mapping[Site, SiteResult], given: tuple[Site, ...]) -> _Ancestry:
    known: set[Site] = set()
    hidden: set[Site] = set()
    waiting = list(_inputs(site, results))
    while waiting:
        source = waiting.pop()
        is_compared = source in results and results[source].status.is_compared
        if source in given or is_compared or _is_shown_right(results, source):
            known.add(source)
        elif source not in hidden:
            hidden.add(source)
            waiting.extend(_inputs(source, results))
    return _Ancestry(known=frozenset(known), hidden=frozenset(hidden))


def _inputs(site: Site, results: Mapping[Site, SiteResult]) -> tuple[Site, ...]:
    """Return a site's inputs, without a failed choice that the site was judged by all the same."""
    given = results.get(_JUDGED_GIVEN[site]) if site in _JUDGED_GIVEN else None
    if given is None or given.routing is None or given.status is not SiteStatus.FAIL:
        return SITE_INPUTS[site]
    return tuple(source for source in SITE_INPUTS[site] if source is not _JUDGED_GIVEN[site])


def _fails(results: Mapping[Site, SiteResult], site: Site) -> bool:
    return site in results and results[site].status is SiteStatus.FAIL


def _is_shown_right(results: Mapping[Site, SiteResult], site: Site) -> bool:
    """Decide whether a site that was not compared must be right, because a site that shows its faults passes."""
    witnesses = _SHOWN_BY.get(site, ())
    return any(one in results and results[one].status is SiteStatus.PASS for one in witnesses)


def _blame(
    layer: int, site: Site, results: Mapping[Site, SiteResult], ancestry: _Ancestry, *, is_chained: bool
) -> Blame:
    suspects = _in_order({*ancestry.hidden, site})
    reason = results[site].reason if len(suspects) == 1 else f"{site}: {results[site].reason}"
    traces = _in_order({known for known in ancestry.known if _fails(results, known)})
    right = _in_order(ancestry.known - set(traces))
    if right:
        reason += f"; {_join(right)} {'is' if len(right) == 1 else 'are'} right"
    if traces:
        reason += (
            f"; {_join(traces)} {'fails' if len(traces) == 1 else 'fail'} by too little to account for it"
        )
    if Site.INPUT in ancestry.hidden:
        reason += "; the layer's input was not captured"
    if ancestry.hidden - {Site.INPUT}:
        reason += "; what lies between was not compared"
    if is_chained:
        command = f"mm2-test single-layer --layer {layer}"
        reason += f"; a chained run shows only where errors begin: run {command} on the golden"
    return Blame(layer=layer, sites=tuple(str(suspect) for suspect in suspects), reason=reason)


def _join(sites: list[Site]) -> str:
    return ", ".join(str(site) for site in sites)


def _in_order(sites: frozenset[Site] | set[Site]) -> list[Site]:
    return sorted(sites, key=lambda site: site.order)


def group_blame(blame: Iterable[Blame], grounds: Iterable[SiteResult]) -> tuple[BlameGroup, ...]:
    """Group blame by the sites that it names, in the order of the first layer of each.

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


def is_inherited(result: SiteResult, inputs: Iterable[SiteResult]) -> bool:
    """Decide whether a failing site breaks its limit by no more than its inputs' errors account for.

    Args:
        result: The failing site's; a failure without a figure, such as NaN or a wrong shape, is never inherited.
        inputs: Results of its inputs, which pass.
    """
    broken = result.nearest
    if broken is None or not broken.excess > 1.0:
        return False
    carried = max((_carried(one, broken) for one in inputs), default=0.0)
    return broken.value**2 <= broken.limit**2 + carried


def _carried(source: SiteResult, broken: NearestLimit) -> float:
    """Return the square of the error that a site passes on, in the unit of the figure broken behind it."""
    if source.noise is not None:
        value: float | None = getattr(source.noise, broken.figure, None)
        return 0.0 if value is None else max(value**2 - 1.0, 0.0)
    if source.relative is not None and source.nearest is not None:
        # No floor tells how much of it is noise: all of it may be an error.
        return (broken.limit * source.nearest.excess) ** 2
    return 0.0
