"""ComparedPart: one layer, the embedding or the head, judged, with the sites that are to blame in it.

- A layer that passes is proved right by its end: the experts' sum, or the output, shows its mistakes.
- A failure in another tool's dump is undecided if the dump lacks the layer's input: the input may be what differs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

from compare.blame.blame import blame_layer, excused_sites
from compare.blame.location import locate_blamed
from compare.blame.recompute import Recomputed, RecomputingJudge
from compare.blame.second_look import SecondLook, look_again
from compare.chains.curve import measure_point
from compare.judging.layer_judge import LayerJudge, measure_golden_site
from compare.judging.model_judge import ModelJudge
from compare.model_runs.cache import CacheJudgement, judge_cache
from compare.model_runs.own_cache import is_right_on_own_cache
from compare.model_runs.passes import PassFault, PassSplit, find_pass_fault
from compare.sides.captured_input import CapturedInput, read_captured_input
from compare.sides.pairing import declared_layers
from compare.sides.port_head import on_port_input, on_port_output
from compare.sides.sides import Sides
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame, CurvePoint, SiteResult, SiteStatus

logger = logging.getLogger(__name__)

SiteKind = TypeVar("SiteKind", Site, ModelSite)

# Sites behind the experts; either shows the layer's mistakes. One in the last residual add does not show in
# `moe_delta`; it shows in the next layer's input in a dump.
_ENDS = (Site.MOE_DELTA, Site.MLP_DELTA, Site.OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPart:
    """Findings in one layer, or outside the layers."""

    layer: int | None = None  # the layer; None outside the layers
    results: tuple[SiteResult, ...] = ()
    blame: tuple[Blame, ...] = ()
    recomputed: tuple[SiteResult, ...] = ()  # second results of sites that fail behind another failing site
    captured_input: CapturedInput | None = None  # None outside the layers, and of a layer that did not run
    # Whether the input carries errors of earlier parts: the part is then blamed only if no earlier part is
    is_inherited: bool = False
    fault: PassFault | None = None  # the first wrong pass of a whole port's run; None if no pass is wrong
    cache: CacheJudgement = field(default_factory=CacheJudgement)  # the cache of a whole port's layer
    is_stopped: bool = False  # whether the run stopped before this part
    num_undecided: int = 0  # number of sites that differ, perhaps through an input that was not captured
    point: CurvePoint | None = None  # point on a chained run's error curve; None if its output was not judged

    @property
    def is_input_unknown(self) -> bool:
        """True for a layer whose input was not captured on both sides."""
        return self.captured_input is not None and not self.captured_input.is_recorded

    @property
    def is_proved(self) -> bool:
        """False for a layer in which a mistake could still pass."""
        # An inherited error widens the floors, which may hide the layer's own mistakes.
        return self.captured_input is None or (not self.is_inherited and is_proved(self.results))


def judge_layer(sides: Sides, layer: int, *, split: PassSplit | None = None) -> ComparedPart:
    """Judge one layer of the run; with a `split`, also its tokens pass by pass.

    Raises:
        IncomparableError: The layer's input is neither the golden's nor another layer's output, or weights do not fit.
    """
    sites = declared_sites(sides.target, layer, graph=sides.reference.graph)
    if layer not in sides.target.layers:
        return _absent(sides.target, layer, tuple(map(str, sites)))
    captured = read_captured_input(sides, layer)
    golden_sides, layer_input = sides, captured
    port_sides = on_port_input(sides, layer) if captured.is_inherited else None
    if port_sides is not None:
        # From here on, the golden is the layer computed on the port's own input, so the layer inherits no error.
        sides, layer_input = port_sides, replace(captured, error=None)
    judge = LayerJudge(sides, layer=layer, layer_input=layer_input)
    judged: Mapping[Site, SiteResult] = {site: judge.judge(site) for site in sites}
    if port_sides is not None:
        # The figures of a chained run are golden against port, whatever judges it.
        judged = {site: measure_golden_site(result, golden_sides) for site, result in judged.items()}
    # Without the layer's input, a site that differs may be wrong, or got a wrong input.
    is_decided = layer_input.is_recorded or sides.is_classic
    results = dict(judged) if is_decided else leave_undecided(judged, sides.target)
    if not is_decided and judge.has_contradictions:
        # Experts that contradict the port's own logits are wrong, whatever the input was.
        results[Site.ROUTER_EXPERTS] = judged[Site.ROUTER_EXPERTS]
    logger.info("Layer %d compared.", layer)
    decided = results
    look, recomputed = _look_closer(results, layer, layer_input=layer_input, judge=judge, sides=sides)
    results = dict(look.results)
    second_results = {site: again.result for site, again in recomputed.items()}
    blame = blame_layer(
        results,
        graph=sides.reference.graph.layer(layer),
        layer=layer,
        given=layer_input.known,
        is_chained=layer_input.is_inherited,
        recomputed=second_results,
        proved=look.proved,
        folded=look.folded,
        inheriting=look.inheriting,
    )
    located: Mapping[Site, SiteResult] = results
    fault, blame_of_all = None, blame
    if split is not None and not layer_input.is_inherited:
        fault = find_pass_fault(
            split,
            lambda batch: _blame_batch(
                replace(sides, batch=batch),
                layer=layer,
                sites=sites,
                layer_input=layer_input,
                passed={site: results[site] for site in look.folded},
            ),
        )
        blame = blame or (() if fault is None else fault.blame)
    cache, is_excused = CacheJudgement(), False
    if split is not None and not layer_input.is_inherited and layer_input.is_recorded:
        is_decoding_wrong = fault is not None and fault.number > 0
        cache = judge_cache(sides, layer, split=split, is_decoding_wrong=is_decoding_wrong)
        # Attention that is right on what the cache holds is no second cause.
        if (
            (cache.holds_fewer_bits or cache.findings)
            and _is_of_cache(fault, blame_of_all, layer=layer, judge=judge, sides=sides)
            and is_right_on_own_cache(sides, layer)
        ):
            blame, fault, is_excused = (), None, cache.holds_fewer_bits
    if layer_input.is_inherited:
        blame = _blame_nonfinite(blame, results)
    else:
        located = locate_blamed(results, blame, judge=judge, recomputed=recomputed, sides=sides)
    if is_excused:
        located = {site: _excuse_cache(result, cache) for site, result in located.items()}
    return ComparedPart(
        layer=layer,
        results=_with_fault(tuple(located.values()), fault, split),
        blame=blame,
        fault=fault,
        cache=cache,
        recomputed=tuple(
            replace(
                result,
                where=located[site].where,
                regions=located[site].regions,
                wrong_tokens=located[site].wrong_tokens,
            )
            for site, result in second_results.items()
        ),
        captured_input=captured,
        is_inherited=layer_input.is_inherited,
        # `leave_undecided` gives another object for each result that it changes, and the same for all others.
        num_undecided=sum(decided[site] is not judged[site] for site in decided),
        # The curve shows the distance from the golden itself, whatever the layer was judged against.
        point=measure_point(golden_sides, layer, results, input_error=captured.error),
    )


def _is_of_cache(
    fault: PassFault | None,
    blame_of_all: tuple[Blame, ...],
    *,
    layer: int,
    judge: LayerJudge,
    sides: Sides,
) -> bool:
    """Decide whether attention of decoded tokens is to blame, which reads the cache, and nothing else.

    Sites behind it that are blamed too, in one pass or in all, must be right on the port's own values of their inputs.
    """
    if fault is None or fault.number == 0:
        return False
    blamed = frozenset(Site(site) for blame in (*fault.blame, *blame_of_all) for site in blame.sites)
    others = tuple(site for site in Site if site in blamed and site is not Site.ATTN_CONTEXT)
    if Site.ATTN_CONTEXT not in blamed or any(site.order < Site.ATTN_CONTEXT.order for site in others):
        return False
    with RecomputingJudge(sides, layer=layer, judge=judge) as recomputing:
        again = recomputing.judge_sites(others, failing=blamed)
    return all(site in again and again[site].result.status is not SiteStatus.FAIL for site in others)


def _excuse_cache(result: SiteResult, cache: CacheJudgement) -> SiteResult:
    """Let a site warn that fails because of a cache in fewer bits."""
    if result.status is not SiteStatus.FAIL:
        return result
    return replace(result, status=SiteStatus.WARN, reason=f"decoded from the cache: {cache.note}")


def judge_outside(
    sides: Sides, sites: tuple[ModelSite, ...], *, split: PassSplit | None = None
) -> ComparedPart:
    """Judge the embedding, or the sites behind the last layer (the head); the first that fails is to blame.

    With a `split`, their tokens are judged pass by pass too.

    `sites` are those that the run declared: the embedding alone, those of the head, or none.
    """
    if not sides.target.model_sites():
        # The run stored nothing outside the layers.
        return _absent(sides.target, None, tuple(map(str, sites)))
    last_layer = max(declared_layers(sides.target))
    is_head = ModelSite.EMBEDDING not in sites
    port_sides = on_port_output(sides, last_layer) if is_head and sites else None
    judge = ModelJudge(port_sides or sides, last_layer=last_layer)
    judged = {site: _of_head(judge.judge(site), is_alone=port_sides is not None) for site in sites}
    if port_sides is not None:
        of_golden = ModelJudge(sides, last_layer=last_layer)
        judged = {site: of_golden.measure_golden(result) for site, result in judged.items()}
    is_input_unknown = is_head and Site.OUTPUT not in sides.target.sites(last_layer)
    results = leave_undecided(judged, sides.target) if is_input_unknown else judged
    blame = _blame_first(results.values())
    fault = None
    if split is not None and (port_sides is not None or not is_head):
        fault = find_pass_fault(
            split,
            lambda batch: _blame_first(
                ModelJudge(replace(port_sides or sides, batch=batch), last_layer=last_layer).judge(site)
                for site in sites
            ),
        )
        blame = blame or (() if fault is None else fault.blame)
    return ComparedPart(
        results=_with_fault(tuple(results.values()), fault, split),
        blame=blame,
        fault=fault,
        is_inherited=is_head and port_sides is None,
        num_undecided=sum(results[site] is not judged[site] for site in results),
    )


def _of_head(result: SiteResult, *, is_alone: bool) -> SiteResult:
    """Mark figures of the logits in which no layer's error is."""
    if result.logits is None or not is_alone:
        return result
    return replace(result, logits=replace(result.logits, is_of_head=True))


def _blame_first(results: Iterable[SiteResult]) -> tuple[Blame, ...]:
    """Blame the first site outside the layers that fails."""
    failing = (result for result in results if result.status is SiteStatus.FAIL)
    return tuple(Blame(layer=None, sites=(first.site,), reason=first.reason) for first in islice(failing, 1))


def _blame_batch(
    sides: Sides,
    *,
    layer: int,
    sites: tuple[Site, ...],
    layer_input: CapturedInput,
    passed: Mapping[Site, SiteResult],
) -> tuple[Blame, ...]:
    """Blame sites of a layer by the tokens of the sides' batch alone, without those that are `passed`."""
    judge = LayerJudge(sides, layer=layer, layer_input=layer_input)
    results = {site: passed[site] if site in passed else judge.judge(site) for site in sites}
    graph = sides.reference.graph.layer(layer)
    return blame_layer(results, graph=graph, layer=layer, given=layer_input.known, is_chained=False)


def _with_fault(
    results: tuple[SiteResult, ...], fault: PassFault | None, split: PassSplit | None
) -> tuple[SiteResult, ...]:
    """Let the sites fail that are wrong in one pass, and that the tokens of all passes together let pass."""
    if fault is None or split is None:
        return results
    reasons = {blame.sites[-1]: blame.reason for blame in fault.blame}
    return tuple(
        replace(result, status=SiteStatus.FAIL, reason=f"{split.name(fault.number)}: {reasons[result.site]}")
        if result.site in reasons and result.status in (SiteStatus.PASS, SiteStatus.WARN)
        else result
        for result in results
    )


def declared_sites(target: CaptureSource, layer: int, *, graph: ModelGraph) -> tuple[Site, ...]:
    """Return the sites of a layer that the run says it computes, in execution order.

    What says nothing, such as a dump, is held to the sites of the golden's `graph`.

    Raises:
        IncomparableError: The golden's graph has no such sites.
    """
    description, held = target.known_description, graph.layer(layer).sites
    if description is None:
        known = (*target.sites(layer), *target.not_exposed(layer))
        return tuple(site for site in held if site in known and site is not Site.INPUT)
    declared = description.run.computed_sites_of(layer)
    unknown = [str(site) for site in declared if site not in held]
    if unknown:
        raise IncomparableError(
            f"layer {layer} of the run is of another kind than the golden's",
            expected=f"sites of the golden's graph: {', '.join(map(str, held))}",
            found=", ".join(unknown),
            next_step="Run the port of the golden's model, on a golden that names its model (not a dump).",
        )
    return declared


def _look_closer(
    results: Mapping[Site, SiteResult],
    layer: int,
    *,
    layer_input: CapturedInput,
    judge: LayerJudge,
    sides: Sides,
) -> tuple[SecondLook, Mapping[Site, Recomputed]]:
    """Look again at the sites to blame; judge those that fail behind them on the port's own values of their inputs.

    Nothing is looked at unless the layer's input is the golden's, or the golden was computed on the port's own.
    """
    if layer_input.is_inherited or not layer_input.is_recorded:
        return SecondLook(results=results), {}
    with RecomputingJudge(sides, layer=layer, judge=judge) as recomputing:
        given = layer_input.known
        look = look_again(results, layer=layer, given=given, judge=judge, recomputing=recomputing)
        failing = {site for site, result in look.results.items() if result.status is SiteStatus.FAIL}
        excused = excused_sites(
            look.results, graph=recomputing.graph, given=given, inheriting=look.inheriting
        )
        return look, recomputing.judge_sites(excused, failing=look.folded | failing)


def _blame_nonfinite(blame: tuple[Blame, ...], results: Mapping[Site, SiteResult]) -> tuple[Blame, ...]:
    """Keep the blame of sites with NaN or Inf: in a layer that inherits errors, no other blame is sure."""
    nonfinite = {
        str(site)
        for site, result in results.items()
        if result.judged_metrics is not None and result.judged_metrics.num_nonfinite_target
    }
    # The last site of a blame is the one that fails; those before it were not compared.
    return tuple(blamed for blamed in blame if blamed.sites[-1] in nonfinite)


def _absent(target: CaptureSource, layer: int | None, sites: tuple[str, ...]) -> ComparedPart:
    """Return a part that the run declared and did not store: it fails only if the run says that it is complete."""
    if target.is_complete:
        status, reason = SiteStatus.FAIL, "missing: the run declared it and did not store it"
    else:
        status, reason = SiteStatus.NOT_JUDGED, "not run: the run stopped before it"
    results = tuple(SiteResult(layer=layer, site=site, status=status, reason=reason) for site in sites)
    return ComparedPart(layer=layer, results=results, is_stopped=bool(sites) and not target.is_complete)


def is_proved(results: Sequence[SiteResult]) -> bool:
    """Decide whether the end of a layer was judged; `results` are those of its sites, in execution order."""
    if not results:
        # A range of layers in an older layout (`LegacyCapture`): its first layer holds an input alone, so nothing of it
        # can be judged. The output of its last layer is.
        return True
    by_site = {Site(result.site): result for result in results}
    # A run of a component, such as attention, has neither of `_ENDS`: its last site is its end.
    ends = [by_site[site] for site in _ENDS if site in by_site] or [results[-1]]
    return any(end.status.is_compared for end in ends)


def leave_undecided(
    results: Mapping[SiteKind, SiteResult], target: CaptureSource
) -> dict[SiteKind, SiteResult]:
    """Leave failures undecided, if the capture's format may omit inputs.

    `results` are those of a part (a layer, or what is outside the layers) whose input was not captured: the caller
    checks that. NaN, infinity, wrong shapes and missing sites still fail. A result that does not change is returned as
    the same object.
    """
    if not target.may_omit_inputs:
        return dict(results)
    return {
        site: _undecided(result) if _may_be_inherited(result) else result for site, result in results.items()
    }


def _may_be_inherited(result: SiteResult) -> bool:
    """Decide whether a wrong input can cause a failure: values or experts were compared, and no NaN was found."""
    if result.status is not SiteStatus.FAIL:
        return False
    if result.routing is not None:
        return True
    metrics = result.judged_metrics
    return metrics is not None and not metrics.num_nonfinite_target


def _undecided(result: SiteResult) -> SiteResult:
    reason = f"{result.reason}; its inputs are not held"
    return replace(result, status=SiteStatus.NOT_JUDGED, reason=reason)
