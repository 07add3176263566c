"""Blame: a site is to blame if it fails and nothing that it is computed from does.

A failing site behind another failure is excused, unless it fails again on the port's own values; behind a small error
that passes, it is to blame only for more than it inherits. Of sites that were not compared, the blame names all that
may hold the fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from compare.blame.regions import MOST_LISTED, TokenList
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.sites import Site
from minimax_tools.results.results import WEIGHTS, Blame, BlameGroup, NearestLimit, SiteResult, SiteStatus

# Sites that show every fault of a site, since they are plain products of it. Other operations may hide a fault: a norm
# hides a wrong scale, attention a shift, a residual add an error that is small beside the stream. Only sites that
# several others are computed from are listed: behind a single one that passes, no failure leads back.
_SHOWN_BY: Mapping[Site, tuple[Site, ...]] = MappingProxyType(
    {
        Site.INPUT_NORM: (Site.Q_PROJ, Site.K_PROJ, Site.V_PROJ),
        Site.POST_NORM: (Site.ROUTER_LOGITS,),
    }
)

# Least share of a figure beyond its limit that an input's own must be, to account for it alone.
_LEAST_CARRIED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ancestry:
    """Sites that a site is computed from, back to those of which something is known."""

    known: frozenset[Site]
    hidden: frozenset[Site]  # the sites in between, which were not compared


def blame_layer(
    results: Mapping[Site, SiteResult],
    *,
    graph: LayerGraph,
    layer: int,
    given: tuple[Site, ...],
    is_chained: bool,
    recomputed: Mapping[Site, SiteResult] = MappingProxyType({}),
    proved: frozenset[Site] = frozenset(),
    folded: frozenset[Site] = frozenset(),
    inheriting: frozenset[Site] = frozenset(),
) -> tuple[Blame, ...]:
    """Return the sites of one layer to blame, in execution order, as `results` are.

    `given` are sites whose values were given to the layer. If it inherits errors (`is_chained`), its blame shows only
    where errors begin. `recomputed` are results of excused sites on the port's own values of their inputs; sites that
    are `proved` fail on these whatever they inherit, `inheriting` ones are right on these. `folded` sites pass
    but for a scale that others undo.
    """
    culprits, excused = _sort_failures(graph, results, given, inheriting)
    blame = {
        site: _build_blame(
            layer,
            site,
            results,
            ancestry,
            graph=graph,
            is_chained=is_chained,
            is_proved=site in proved,
            folded=folded,
        )
        for site, ancestry in culprits.items()
    }
    for site in excused:
        if _fails(recomputed, site):
            blame[site] = Blame(layer=layer, sites=(str(site),), reason=recomputed[site].reason)
    return tuple(blame[site] for site in _in_order(set(blame)))


def excused_sites(
    results: Mapping[Site, SiteResult],
    *,
    graph: LayerGraph,
    given: tuple[Site, ...],
    inheriting: frozenset[Site] = frozenset(),
) -> tuple[Site, ...]:
    """Return the failing sites behind another failure, which their error may come from, in execution order."""
    return _sort_failures(graph, results, given, inheriting)[1]


def group_blame(blame: Iterable[Blame], grounds: Iterable[SiteResult]) -> tuple[BlameGroup, ...]:
    """Group causes by the sites that they name; `blame` is that of all layers, ascending."""
    by_site = {(result.layer, result.site): result for result in grounds}
    groups: dict[tuple[tuple[tuple[str, ...], str], ...], list[tuple[Blame, ...]]] = {}
    for cause in join_causes(blame):
        # Of weights the reason is all: no site tells which layer is the worst.
        key = tuple((blamed.sites, blamed.reason if blamed.sites == (WEIGHTS,) else "") for blamed in cause)
        groups.setdefault(key, []).append(cause)
    return tuple(_build_group(causes, by_site) for causes in groups.values())


def join_causes(blame: Iterable[Blame]) -> tuple[tuple[Blame, ...], ...]:
    """Return the blame of each cause of each layer: one, or two that share their `operation`."""
    causes: list[list[Blame]] = []
    shared: dict[tuple[int | None, str], list[Blame]] = {}
    for blamed in blame:
        place = (blamed.layer, blamed.operation)
        if place in shared:
            shared[place].append(blamed)
            continue
        causes.append([blamed])
        if blamed.operation:
            shared[place] = causes[-1]
    return tuple(map(tuple, causes))


def badness(result: SiteResult) -> float:
    """Return how far a failing site is beyond its limit; infinite for NaN and other failures without a figure."""
    if result.status is not SiteStatus.FAIL:
        return 0.0
    return math.inf if result.nearest is None else result.nearest.excess


def inputs_carrying(
    site: Site,
    results: Mapping[Site, SiteResult],
    *,
    graph: LayerGraph,
    broken: NearestLimit | None = None,
) -> tuple[Site, ...]:
    """Return the inputs of a site that pass, and whose error may be all that makes it fail."""
    own = results[site].nearest if broken is None else broken
    if own is None:
        return ()
    passing = (one for one in graph.inputs[site] if _has_status(results, one, SiteStatus.PASS))
    return tuple(
        source
        for source in passing
        if carries(results[source], own) >= (_LEAST_CARRIED * own.value) ** 2
        and own.value**2 <= own.limit**2 + carries(results[source], own)
    )


def is_inherited(result: SiteResult, inputs: Iterable[SiteResult]) -> bool:
    """Decide whether a failing site breaks its limit by no more than the errors of its inputs account for."""
    # The figure that breaks its limit most; `excess` is the figure divided by the limit.
    broken = result.nearest
    if broken is None or not broken.excess > 1.0:
        return False
    # The inputs' errors come from one failure, so the worst of them counts, not their sum.
    carried = max((carries(source, broken) for source in inputs), default=0.0)
    # What the site adds is independent of it, so the squares add up.
    return broken.value**2 <= broken.limit**2 + carried


def carries(source: SiteResult, broken: NearestLimit) -> float:
    """Return the square of the error that a site passes on, in the unit of the figure broken behind it."""
    if source.noise is not None:
        value: float | None = getattr(source.noise, broken.figure, None)
        # Up to 1, the error is the floor's own, which the site behind counts in its floor already.
        return 0.0 if value is None else max(value**2 - 1.0, 0.0)
    if source.relative is not None and source.nearest is not None:
        # Without a floor, nothing tells how much of the error is noise: all of it may be passed on. An error of so many
        # limits here becomes one of as many limits there.
        return (broken.limit * source.nearest.excess) ** 2
    return 0.0


def _sort_failures(
    graph: LayerGraph, results: Mapping[Site, SiteResult], given: tuple[Site, ...], inherited: frozenset[Site]
) -> tuple[dict[Site, _Ancestry], tuple[Site, ...]]:
    """Sort failing sites into those to blame, with their ancestry, and those that a failure before them excuses.

    `results` are in execution order: a site that is left out is known when those behind it are sorted.
    Left out are sites whose error is merely inherited through sites that pass, the `inherited` ones surely.
    """
    culprits: dict[Site, _Ancestry] = {}
    excused: list[Site] = []
    # The sites left out; they excuse none behind them.
    inheriting: set[Site] = set()
    for site, result in results.items():
        if result.status is not SiteStatus.FAIL:
            continue
        ancestry = _ancestry(graph, site, results, given)
        if any(_fails(results, source) and source not in inheriting for source in ancestry.known):
            excused.append(site)
        elif site in inherited or _is_merely_inherited(graph, site, results, ancestry):
            inheriting.add(site)
        else:
            culprits[site] = ancestry
    return culprits, tuple(excused)


def _is_merely_inherited(
    graph: LayerGraph, site: Site, results: Mapping[Site, SiteResult], ancestry: _Ancestry
) -> bool:
    if not fails_before(graph, site, results):
        return False
    return is_inherited(results[site], [results[known] for known in ancestry.known if known in results])


def fails_before(graph: LayerGraph, site: Site, results: Mapping[Site, SiteResult]) -> bool:
    """Decide whether a site fails that another is computed from, directly or not."""
    return any(_fails(results, source) for source in _all_sources(graph, site, results))


def _all_sources(graph: LayerGraph, site: Site, results: Mapping[Site, SiteResult]) -> frozenset[Site]:
    sources: set[Site] = set()
    waiting = list(_inputs(graph, site, results))
    while waiting:
        source = waiting.pop()
        if source not in sources:
            sources.add(source)
            waiting.extend(_inputs(graph, source, results))
    return frozenset(sources)


def _ancestry(
    graph: LayerGraph, site: Site, results: Mapping[Site, SiteResult], given: tuple[Site, ...]
) -> _Ancestry:
    known: set[Site] = set()
    hidden: set[Site] = set()
    waiting = list(_inputs(graph, site, results))
    while waiting:
        source = waiting.pop()
        is_compared = source in results and results[source].status.is_compared
        if source in given or is_compared or _is_shown_right(results, source):
            known.add(source)
        elif source not in hidden:
            hidden.add(source)
            waiting.extend(_inputs(graph, source, results))
    return _Ancestry(known=frozenset(known), hidden=frozenset(hidden))


def _inputs(graph: LayerGraph, site: Site, results: Mapping[Site, SiteResult]) -> tuple[Site, ...]:
    """Return a site's inputs, without a wrong choice of experts if the site was judged with that choice."""
    # The experts' sum is judged with the port's own choice, which does not excuse it.
    choice = results.get(Site.ROUTER_EXPERTS) if site is graph.routed_sum else None
    # A choice without `routing`, of a wrong shape say, could not be compared: nothing was judged with it.
    if choice is None or choice.routing is None or choice.status is not SiteStatus.FAIL:
        return graph.inputs[site]
    return tuple(source for source in graph.inputs[site] if source is not Site.ROUTER_EXPERTS)


def _is_shown_right(results: Mapping[Site, SiteResult], site: Site) -> bool:
    """Decide whether a site that was not compared must be right, because a site that shows its faults passes."""
    witnesses = (results.get(witness) for witness in _SHOWN_BY.get(site, ()))
    return any(result is not None and result.status is SiteStatus.PASS for result in witnesses)


def _fails(results: Mapping[Site, SiteResult], site: Site) -> bool:
    return _has_status(results, site, SiteStatus.FAIL)


def _has_status(results: Mapping[Site, SiteResult], site: Site, status: SiteStatus) -> bool:
    return site in results and results[site].status is status


def _build_blame(
    layer: int,
    site: Site,
    results: Mapping[Site, SiteResult],
    ancestry: _Ancestry,
    *,
    graph: LayerGraph,
    is_chained: bool,
    is_proved: bool,
    folded: frozenset[Site],
) -> Blame:
    """Build the blame of a site; its reason tells what is right before it and what was not compared."""
    # All of the error may be inherited from an input that passes.
    carrying = set() if is_proved else set(inputs_carrying(site, results, graph=graph)) & ancestry.known
    suspects = _in_order({*ancestry.hidden, *carrying, site})
    reason = results[site].reason if len(suspects) == 1 else f"{site}: {results[site].reason}"
    # The errors of failing sites among the known ones are merely inherited, else they would excuse this site.
    inheriting = _in_order({known for known in ancestry.known if _fails(results, known)})
    warned = _in_order({known for known in ancestry.known if _has_status(results, known, SiteStatus.WARN)})
    right = _in_order(ancestry.known - {*inheriting, *warned, *carrying, *folded})
    if right:
        reason += f"; {_join(right)} {'is' if len(right) == 1 else 'are'} right"
    reason += "".join(f"; {known} warns: {results[known].reason}" for known in warned)
    if inheriting:
        verb = "fails" if len(inheriting) == 1 else "fail"
        reason += f"; {_join(inheriting)} {verb} by too little to account for it"
    if carrying:
        reason += f"; {_join(_in_order(carrying))} passes, and its error may account for it"
    if Site.INPUT in ancestry.hidden:
        reason += "; the layer's input was not captured"
    if ancestry.hidden - {Site.INPUT}:
        reason += "; what lies between was not compared"
    if is_chained:
        command = f"mm2-test single-layer --layer {layer}"
        reason += f"; a chained run shows only where errors begin: run {command} on the golden"
    return Blame(
        layer=layer,
        sites=tuple(str(suspect) for suspect in suspects),
        reason=reason,
        right=tuple(str(site) for site in right),
    )


def _join(sites: list[Site]) -> str:
    return ", ".join(str(site) for site in sites)


def _in_order(sites: frozenset[Site] | set[Site]) -> list[Site]:
    return sorted(sites, key=lambda site: site.order)


def _build_group(
    causes: list[tuple[Blame, ...]], by_site: Mapping[tuple[int | None, str], SiteResult]
) -> BlameGroup:
    def results_of(cause: tuple[Blame, ...]) -> list[SiteResult]:
        places = ((blame.layer, site) for blame in cause for site in blame.sites)
        return [by_site[place] for place in places if place in by_site]

    worst = max(causes, key=lambda cause: max(map(badness, results_of(cause)), default=0.0))
    first, *others = worst
    alike = _word_tokens_of_all(
        [result for cause in causes for result in results_of(cause)], results_of(worst)
    )
    # Of several sites each sentence names its own.
    reasons = [f"{blame.sites[-1]}: {blame.reason}" for blame in worst] if others else [first.reason]
    return BlameGroup(
        layers=tuple(cause[0].layer for cause in causes),
        sites=tuple(site for blame in worst for site in blame.sites),
        worst_layer=first.layer,
        reason="; ".join(reasons),
        where=tuple(
            f"{result.site}: {sentence}" if others else sentence
            for result in results_of(worst)
            for sentence in result.where
        )
        + alike,
        regions=tuple(region for result in results_of(worst) for region in result.regions),
        operation=first.operation if others else "",
    )


def _word_tokens_of_all(results: Sequence[SiteResult], told: Sequence[SiteResult]) -> tuple[str, ...]:
    """List the wrong tokens of all layers together, if those of the layer that is told are not all; () if many are."""
    places = {place for result in results for place in result.wrong_tokens}
    is_known = all(result.wrong_tokens for result in results)
    if (
        not is_known
        or len(places) > MOST_LISTED
        or places == {p for result in told for p in result.wrong_tokens}
    ):
        return ()
    return (f"wrong tokens of all these layers together: {TokenList.of(places)}",)
