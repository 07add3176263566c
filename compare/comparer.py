"""The comparison of a device run with its golden: every layer-site pair of the run, a verdict, the blame."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from compare.blame.blame import blame_layer, excused_sites, group_blame
from compare.blame.location import locate_blamed
from compare.blame.recomputed_judge import Recomputed, judge_recomputed
from compare.chains.curve import measure_point, trace_curve
from compare.judging.coverage import is_proved, leave_undecided, undecided_notes, unproved_notes, word_tokens
from compare.judging.layer_judge import LayerJudge
from compare.judging.model_judge import ModelJudge
from compare.judging.router_dtypes import find_router_dtypes
from compare.limits.criteria import Criteria, layers_without_output
from compare.limits.limits import NOISE_FIGURES
from compare.notes import (
    backend_notes,
    certificate_notes,
    classic_notes,
    digest_notes,
    dump_notes,
    feed_notes,
    flip_notes,
    floor_notes,
    generation_notes,
    nonfinite_notes,
    router_notes,
    side_notes,
    unfinished_notes,
)
from compare.sides.batch import Batch
from compare.sides.captured_input import CapturedInput, read_captured_input
from compare.sides.golden_weights import WeightSource, keep_layer_open
from compare.sides.own_head import on_own_output
from compare.sides.own_input import on_own_input
from compare.sides.pairing import declared_layers, refuse_other_runs, select_layers
from compare.sides.proving import proved
from compare.sides.sides import Sides
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import (
    Blame,
    Comparison,
    CurvePoint,
    GeneratedRow,
    SiteResult,
    SiteStatus,
    Verdict,
)

logger = logging.getLogger(__name__)

# What a blame names that belongs to no site: tokens that were made behind the prompts.
GENERATED_TOKENS = "generated_tokens"
_MOST_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What was found in one layer, or outside the layers.

    Args:
        results: Its sites.
        blame: Whom they blame.
        refed: Some of the sites once more, judged by what the port itself computed them from.
        layer: The layer; None outside them.
        is_stopped: Whether the run stopped before it.
        is_handed_on: Whether other layers' errors were handed to it: it blames only where they do not.
        is_fed_unknown: Whether nothing tells what it was fed.
        num_undecided: How many of its sites differ, and may do so for what it was fed.
        point: How far its output is from the golden's; None where that was not judged.
        is_proved: Whether what leaves it was judged.
    """

    results: tuple[SiteResult, ...]
    blame: tuple[Blame, ...] = ()
    refed: tuple[SiteResult, ...] = ()
    layer: int | None = None
    is_stopped: bool = False
    is_handed_on: bool = False
    is_fed_unknown: bool = False
    num_undecided: int = 0
    point: CurvePoint | None = None
    is_proved: bool = True


@proved
def compare_captures(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    criteria: Criteria,
    layer_pattern: str,
    weights: WeightSource | None = None,
) -> Comparison:
    """Judge `target` against the golden `reference`.

    Args:
        reference: The golden.
        target: The device run.
        criteria: How to judge.
        layer_pattern: Which of the run's layers, as `layer_7` or `layer_*`; what lies outside the layers is
            judged where all of them are chosen.
        weights: Those of the golden, so that it replays the experts of a port that chose others, and computes what
            stands behind a failing site from the port's own values; None where they are not known: tokens that the
            port sends to other experts are then left out behind them, and a second culprit behind a first is not named.

    Raises:
        IncomparableError: The captures must not be judged against each other.
        UsageError: No layer matches the pattern.
        CaptureError: A file is missing or damaged.
    """
    with keep_layer_open(weights) as source:
        return _compare(reference, target, criteria=criteria, layer_pattern=layer_pattern, weights=source)


def _compare(
    reference: CaptureSource,
    target: CaptureSource,
    *,
    criteria: Criteria,
    layer_pattern: str,
    weights: WeightSource | None,
) -> Comparison:
    notes = refuse_other_runs(reference, target)
    layers = select_layers(reference, target, layer_pattern)
    model = _declared_model_sites(target) if layers == declared_layers(target) else ()
    num_sites = len(model) + sum(len(_declared_sites(target, layer)) for layer in layers)
    sides = Sides(
        reference=reference,
        target=target,
        batch=Batch.of(reference, target),
        criteria=replace(criteria, num_figures=num_sites * len(NOISE_FIGURES)),
        weights=weights,
    )
    parts = [_compare_layer(sides, layer) for layer in layers]
    embedding = _compare_model(sides, tuple(site for site in model if site is ModelSite.EMBEDDING))
    head = _compare_model(sides, tuple(site for site in model if site is not ModelSite.EMBEDDING))
    sites = tuple(result for part in (*parts, embedding, head) for result in part.results)
    generated = (
        ModelJudge(sides, last_layer=max(layers)).judge_generated() if ModelSite.LOGITS in model else ()
    )
    blame = _gather_blame(
        [
            embedding,
            *parts,
            head,
            _Part(results=(), blame=_blame_tokens(generated, criteria), is_handed_on=True),
        ]
    )
    if sides.is_classic and _is_chained(target, parts):
        blame = ()
    outputs_missing = layers_without_output(sites) if sides.is_classic else ()
    num_undecided = sum(part.num_undecided for part in (*parts, head))
    unproved = [part.layer for part in parts if part.layer is not None and not part.is_proved]
    router_dtypes = find_router_dtypes(reference, target, sites)
    return Comparison(
        reference=str(reference.directory),
        target=str(target.directory),
        criteria=criteria.name,
        verdict=_conclude(
            sites,
            is_stopped=any(part.is_stopped for part in (*parts, head))
            or num_undecided > 0
            or bool(outputs_missing)
            or (bool(unproved) and not sides.is_classic),
            is_suspect=bool(router_dtypes),
            is_faulty=bool(blame),
        ),
        sites=sites,
        blame=blame,
        blame_groups=group_blame(blame, (*sites, *(result for part in parts for result in part.refed))),
        curve=trace_curve(
            [part.point for part in parts if part.point is not None], sites, target=target, golden=reference
        ),
        notes=(
            *notes,
            *dump_notes(reference, target),
            *unfinished_notes(sides),
            *feed_notes(part.layer for part in parts if part.is_fed_unknown),
            *undecided_notes(num_undecided),
            *unproved_notes(unproved, sides=sides),
            *nonfinite_notes(sites, blame),
            *side_notes(reference, target),
            *certificate_notes(reference),
            *digest_notes(reference, target),
            *floor_notes(reference),
            *generation_notes(sides),
            *backend_notes(sides),
            *router_notes(router_dtypes),
            *flip_notes(sites, sides),
            *classic_notes(sides, outputs_missing),
        ),
        router_dtypes=router_dtypes,
        generated=generated,
        tokens=word_tokens(reference, target),
    )


def _compare_layer(sides: Sides, layer: int) -> _Part:
    sites = _declared_sites(sides.target, layer)
    if layer not in sides.target.layers:
        return _absent(sides.target, layer, tuple(str(site) for site in sites))
    feed = read_captured_input(sides, layer)
    given, incoming = sides, feed.incoming
    own = on_own_input(sides, layer) if feed.is_handed_on else None
    if own is not None:
        sides, feed = own, replace(feed, incoming=None)
    judge = LayerJudge(sides, layer=layer, feed=feed)
    judged = judge.judge_all(sites)
    is_decided = feed.is_recorded or sides.is_classic
    results = judged if is_decided else leave_undecided(judged, sides.target)
    logger.info("Layer %d compared.", layer)
    refed = _judge_excused(results, layer, feed=feed, judge=judge, sides=sides)
    blame = blame_layer(
        results,
        layer=layer,
        fed=feed.known,
        is_chained=feed.is_handed_on,
        refed={site: one.result for site, one in refed.items()},
    )
    located = results
    if not feed.is_handed_on:
        located = locate_blamed(results, blame, judge=judge, refed=refed, sides=sides)
    return _Part(
        layer=layer,
        results=tuple(located.values()),
        blame=blame if not feed.is_handed_on else _blame_nonfinite(blame, results),
        refed=tuple(replace(one.result, where=located[site].where) for site, one in refed.items()),
        is_handed_on=feed.is_handed_on,
        is_fed_unknown=not feed.is_recorded,
        num_undecided=sum(results[site] is not judged[site] for site in results),
        point=measure_point(given, layer, results, incoming=incoming),
        # Floors that are widened by what a layer was handed hide its own mistakes.
        is_proved=not feed.is_handed_on and is_proved(tuple(results.values())),
    )


def _judge_excused(
    results: Mapping[Site, SiteResult], layer: int, *, feed: CapturedInput, judge: LayerJudge, sides: Sides
) -> Mapping[Site, Recomputed]:
    """What a failure before them excuses, once more; nothing of a layer that was not fed the golden's own input."""
    if feed.is_handed_on or not feed.is_recorded:
        return {}
    failing = frozenset(site for site, result in results.items() if result.status is SiteStatus.FAIL)
    excused = excused_sites(results, fed=feed.known)
    return judge_recomputed(excused, layer=layer, failing=failing, judge=judge, sides=sides)


def _blame_nonfinite(blame: tuple[Blame, ...], results: Mapping[Site, SiteResult]) -> tuple[Blame, ...]:
    """Keep the blame of sites that made a NaN or Inf: of a layer that was handed errors, they alone are sure."""
    made = {
        str(site)
        for site, one in results.items()
        if one.metrics is not None and one.metrics.num_nonfinite_target
    }
    return tuple(one for one in blame if one.sites[-1] in made)


def _compare_model(sides: Sides, sites: tuple[ModelSite, ...]) -> _Part:
    """Sites outside the layers; the first that fails is to blame."""
    if not sides.target.model_sites():
        return _absent(sides.target, None, tuple(str(site) for site in sites))
    last_layer = max(declared_layers(sides.target))
    is_head = ModelSite.EMBEDDING not in sites
    own = on_own_output(sides, last_layer) if is_head and sites else None
    sides = sides if own is None else own
    judge = ModelJudge(sides, last_layer=last_layer)
    judged = {site: judge.judge(site) for site in sites}
    is_fed_unknown = is_head and Site.OUTPUT not in sides.target.sites(last_layer)
    left = leave_undecided(judged, sides.target) if is_fed_unknown else judged
    results = tuple(left.values())
    failing = [result for result in results if result.status is SiteStatus.FAIL]
    return _Part(
        results=results,
        blame=tuple(Blame(layer=None, sites=(result.site,), reason=result.reason) for result in failing[:1]),
        is_handed_on=is_head and own is None,
        num_undecided=sum(left[site] is not judged[site] for site in left),
    )


def _blame_tokens(generated: tuple[GeneratedRow, ...], criteria: Criteria) -> tuple[Blame, ...]:
    """Tokens that noise does not explain: what made them went wrong behind the prompts, or this little before."""
    failing = [row for row in generated if row.status is SiteStatus.FAIL]
    if not failing or criteria.name == "classic":
        return ()
    rows = "; ".join(
        f"prompt {row.row}: token {row.num_alike} is {row.target}, the golden's is {row.reference}, {row.reason}"
        for row in failing[:_MOST_ROWS]
    )
    more = f"; and {len(failing) - _MOST_ROWS} more" if len(failing) > _MOST_ROWS else ""
    return (Blame(layer=None, sites=(GENERATED_TOKENS,), reason=rows + more),)


def _is_chained(target: CaptureSource, parts: list[_Part]) -> bool:
    """Return whether layers were fed each other's outputs, or nobody knows what: limits then blame nobody."""
    description = target.known_description
    if description is not None:
        return description.run.mode is Mode.CHAINED
    return any(part.is_handed_on or part.is_fed_unknown for part in parts)


def _absent(target: CaptureSource, layer: int | None, sites: tuple[str, ...]) -> _Part:
    """Sites that the run declares and does not hold: a fault only of a run that says it is complete."""
    if target.is_complete:
        status, reason = SiteStatus.FAIL, "missing: the run declared it and did not store it"
    else:
        status, reason = SiteStatus.NOT_JUDGED, "not run: the device run stopped before it"
    results = tuple(SiteResult(layer=layer, site=site, status=status, reason=reason) for site in sites)
    return _Part(layer=layer, results=results, is_stopped=bool(sites) and not target.is_complete)


def _declared_sites(target: CaptureSource, layer: int) -> tuple[Site, ...]:
    description = target.known_description
    if description is not None:
        return description.run.computed_sites
    known = (*target.sites(layer), *target.not_exposed(layer))
    return tuple(site for site in Site if site in known and site is not Site.INPUT)


def _declared_model_sites(target: CaptureSource) -> tuple[ModelSite, ...]:
    description = target.known_description
    return description.run.model_sites if description is not None else target.model_sites()


def _gather_blame(parts: list[_Part]) -> tuple[Blame, ...]:
    """Whom the parts blame, in the order of the data flow; past the first fault, only those fed afresh."""
    blame: list[Blame] = []
    for part in parts:
        if not (part.is_handed_on and blame):
            blame.extend(part.blame)
    return tuple(blame)


def _conclude(
    sites: tuple[SiteResult, ...], *, is_stopped: bool, is_suspect: bool, is_faulty: bool
) -> Verdict:
    statuses = {site.status for site in sites}
    if is_faulty or SiteStatus.FAIL in statuses:
        return Verdict.FAIL
    if is_stopped or not any(status.is_compared for status in statuses):
        return Verdict.INCOMPARABLE
    return Verdict.WARN if is_suspect or SiteStatus.WARN in statuses else Verdict.PASS
