"""Second look: results of a layer that the sites around a failing one correct, with the weights at hand.

- A scale is folded: each channel of a site is a multiple of the golden's, and the weights of all that reads it undo
  that, as AWQ and SmoothQuant do: the site passes, and a reader that does not undo it fails.
- A site fails only by the error of an input that passes, and it is right given that input: then the input fails.
- A site fails behind inputs that pass, another site fails before them, and it is right given these inputs: they carry
  that site's error, and this one is not to blame.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from compare.blame.blame import blame_layer, carries, fails_before, inputs_carrying
from compare.blame.recompute import Recomputed, RecomputingJudge
from compare.blame.regions import find_scale, unscaled
from compare.judging.judge import describe_figure
from compare.judging.layer_judge import LayerJudge
from minimax_tools.model.graph import LayerGraph
from minimax_tools.model.sites import Site
from minimax_tools.reference.right_stages import sites_behind
from minimax_tools.results.results import SiteResult, SiteStatus

# Sites into which a scale can be folded, since weights behind them, or the attention's own scale, can undo it; and the
# site behind each that then shows it too.
_SHOWN_BEHIND: Mapping[Site, tuple[Site, ...]] = MappingProxyType(
    {
        Site.INPUT_NORM: (),
        Site.V_PROJ: (Site.ATTN_CONTEXT,),
        Site.Q_NORM: (Site.Q_ROPE,),
        Site.K_NORM: (Site.K_ROPE,),
        Site.POST_NORM: (),
    }
)

Results = Mapping[Site, SiteResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondLook:
    """The results of one layer, corrected."""

    results: Results
    folded: frozenset[Site] = frozenset()  # sites that pass although their channels are scaled
    # Sites that fail on the port's own inputs, whatever errors these carry
    proved: frozenset[Site] = frozenset()
    # Sites that are right on the port's own inputs, which carry the error of a failing site before them
    inheriting: frozenset[Site] = frozenset()


def look_again(
    results: Results, *, layer: int, given: tuple[Site, ...], judge: LayerJudge, recomputing: RecomputingJudge
) -> SecondLook:
    """Look at the sites to blame in one layer again; `given` are sites whose values were given to it.

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: They cannot be read.
    """
    folded: dict[Site, SiteResult] = {}
    graph = recomputing.graph
    for site in _culprits(graph, results, layer, given):
        if site in _SHOWN_BEHIND and site not in folded:
            folded |= _find_folded(site, results, judge=judge, recomputing=recomputing)
    corrected = {**results, **folded}
    passed = frozenset(site for site, result in folded.items() if result.status is SiteStatus.PASS)
    proved, inheriting = set(), set()
    for site in _culprits(graph, corrected, layer, given):
        carrying = [
            source for source in inputs_carrying(site, corrected, graph=graph) if source not in passed
        ]
        is_behind_failure = fails_before(graph, site, corrected)
        own = _on_own_inputs(site, recomputing) if carrying or is_behind_failure else None
        if own is None:
            continue
        if own.result.status is SiteStatus.FAIL:
            proved.add(site)
        elif is_behind_failure:
            inheriting.add(site)
        else:
            origin = _find_origin(graph, site, corrected)
            corrected[origin] = _blamed_by(site, origin, corrected)
    return SecondLook(
        results=corrected, folded=passed, proved=frozenset(proved), inheriting=frozenset(inheriting)
    )


def _culprits(graph: LayerGraph, results: Results, layer: int, given: tuple[Site, ...]) -> tuple[Site, ...]:
    blame = blame_layer(results, graph=graph, layer=layer, given=given, is_chained=False)
    return tuple(Site(blamed.sites[-1]) for blamed in blame)


def _on_own_inputs(site: Site, recomputing: RecomputingJudge) -> Recomputed | None:
    """Judge a site on the values that the port shows of its inputs; None if it cannot be computed from them."""
    return next(recomputing.judgements(site, doubted=frozenset()), None)


def _find_origin(graph: LayerGraph, site: Site, results: Results) -> Site:
    """Follow the largest error that a failing site inherits from sites that pass, to where it begins."""
    broken = results[site].nearest
    assert broken is not None, "a site that others' errors make fail has a figure"
    origin = site
    while carrying := inputs_carrying(origin, results, graph=graph, broken=broken):
        origin = max(carrying, key=lambda source: carries(results[source], broken))
    return origin


def _blamed_by(site: Site, origin: Site, results: Results) -> SiteResult:
    broken, result = results[site].nearest, results[origin]
    assert broken is not None, "a site that others' errors make fail has a figure"
    assert result.noise is not None, "an inherited error has figures"
    value = getattr(result.noise, broken.figure)
    reason = (
        f"{describe_figure(replace(broken, value=value), result.noise)}, within its own limit; {site} is beyond its "
        "limit by it, and right on it"
    )
    return replace(result, status=SiteStatus.FAIL, reason=reason)


def _find_folded(
    site: Site, results: Results, *, judge: LayerJudge, recomputing: RecomputingJudge
) -> dict[Site, SiteResult]:
    """Find the sites that a folded scale changes, from the first on, and the readers that do not undo it."""
    scaled = _find_scaled(site, results, judge)
    if not scaled:
        return {}
    readers = _compared_readers(recomputing.graph, scaled, results)
    failing = frozenset(one for one, result in results.items() if result.status is SiteStatus.FAIL)
    outcomes = {
        reader: list(recomputing.judgements(reader, doubted=failing | scaled.keys())) for reader in readers
    }
    right = [
        reader
        for reader, judged in outcomes.items()
        if results[reader].status is not SiteStatus.FAIL or _is_right_without(scaled, judged)
    ]
    undoing = [reader for reader in right if _notices(reader, scaled, outcomes[reader], recomputing.graph)]
    if not undoing:
        return {}
    found = {
        one: replace(
            result,
            status=SiteStatus.PASS,
            reason=f"each channel is off by a factor, which is undone in {_join(undoing)}",
        )
        for one, result in scaled.items()
    }
    for reader in readers:
        if reader not in right:
            words = f"the scale of {_join(scaled)} is undone in {_join(undoing)}, and not here"
            found[reader] = replace(results[reader], reason=f"{results[reader].reason}; {words}")
    return found


def _find_scaled(site: Site, results: Results, judge: LayerJudge) -> dict[Site, SiteResult]:
    """Return results of a site, and of one that shows its scale too, judged without the factors; {} without any."""
    scaled: dict[Site, SiteResult] = {}
    for one in (site, *_SHOWN_BEHIND[site]):
        is_failing = one in results and results[one].status is SiteStatus.FAIL
        rows = judge.judged_rows(one) if is_failing else None
        if rows is None or rows.num_tokens == 0 or not bool(rows.target.isfinite().all()):
            break
        scale = find_scale(rows, head_dim=None, is_right=partial(judge.is_right, one))
        if scale is None or scale.of == "token":
            break
        judged = judge.judge_rows(one, unscaled(rows, scale))
        scaled[one] = replace(
            results[one],
            where=(str(scale),),
            noise=judged.noise,
            relative=judged.relative,
            nearest=judged.nearest,
        )
    return scaled


def _compared_readers(graph: LayerGraph, scaled: Iterable[Site], results: Results) -> tuple[Site, ...]:
    """Return the nearest compared sites that are computed from scaled ones, themselves not scaled."""
    passed_on, readers = set(scaled), []
    for site, inputs in graph.inputs.items():
        if site in passed_on or not passed_on & set(inputs):
            continue
        if site in results and results[site].status.is_compared:
            readers.append(site)
        else:
            passed_on.add(site)
    return tuple(readers)


def _is_right_without(scaled: Iterable[Site], judged: Iterable[Recomputed]) -> bool:
    """Decide whether a site is right on the golden's values of the scaled sites, beside the port's of the others."""
    return any(again.result.status is not SiteStatus.FAIL for again in judged if not again.own & set(scaled))


def _notices(reader: Site, scaled: Collection[Site], judged: Iterable[Recomputed], graph: LayerGraph) -> bool:
    """Decide whether a site would be wrong, were it computed from the scaled values by the checkpoint's weights.

    Its inputs that are computed from these must be the port's too: with the golden's they are of two layers.
    """
    following = set(graph.inputs[reader]) & sites_behind(graph, frozenset(scaled))
    return any(
        again.result.status is SiteStatus.FAIL
        for again in judged
        if again.own & set(scaled) and following <= again.own
    )


def _join(sites: Iterable[Site]) -> str:
    *first, last = map(str, sites)
    return f"{', '.join(first)} and {last}" if first else last
