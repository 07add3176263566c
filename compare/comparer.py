"""The comparison of a device run with its golden: every layer-site pair of the run's span, a verdict, the blame."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from compare.blame import blame_layer
from compare.criteria import judge_classic, judge_noise, judge_without_floor
from compare.judge import Criteria, LayerJudge, judge_layer
from compare.noise import Rows, noise_ratio, relative_error
from compare.pairing import is_chained, refuse_foreign, refuse_other_input, select_layers
from minimax_tools.capture.source import CaptureSource
from minimax_tools.floor import massive_channels, token_rows
from minimax_tools.metrics import compare_tensors
from minimax_tools.results import Blame, Comparison, SiteResult, SiteStatus, Verdict
from minimax_tools.sites import ModelSite, Site

logger = logging.getLogger(__name__)


def compare_captures(
    reference: CaptureSource, target: CaptureSource, *, criteria: Criteria, layer_pattern: str
) -> Comparison:
    """Judge `target` against the golden `reference`.

    Args:
        reference: The golden.
        target: The device run.
        criteria: How to judge.
        layer_pattern: Which of the target's layers, as `layer_7` or `layer_*`.

    Raises:
        IncomparableError: The captures must not be judged against each other.
        UsageError: No layer matches the pattern.
        CaptureError: A file is missing or damaged.
    """
    notes = refuse_foreign(reference, target)
    layers = select_layers(reference, target, layer_pattern)
    sites: list[SiteResult] = []
    blame: list[Blame] = []
    for layer in layers:
        results = _compare_layer(reference, target, layer=layer, criteria=criteria)
        sites.extend(results.values())
        chained = _is_handed_on(target, layer)
        # Past the first onset a chained run says nothing about who is to blame.
        if not (chained and blame):
            blame.extend(blame_layer(results, layer=layer, fed=_fed_sites(target), is_chained=chained))
        logger.info("Layer %d compared.", layer)
    model_results = _compare_model(reference, target, criteria=criteria, last_layer=layers[-1])
    sites.extend(model_results)
    if not blame:
        blame.extend(_blame_model(model_results))
    return Comparison(
        reference=str(reference.directory),
        target=str(target.directory),
        criteria=criteria.name,
        verdict=_verdict(sites),
        sites=tuple(sites),
        blame=tuple(blame),
        notes=(*notes, *_floor_notes(reference), *_router_notes(reference, target)),
    )


def _compare_layer(
    reference: CaptureSource, target: CaptureSource, *, layer: int, criteria: Criteria
) -> Mapping[Site, SiteResult]:
    handed_on = _is_handed_on(target, layer)
    if not handed_on:
        refuse_other_input(reference, target, layer)
    incoming = _incoming(reference, target, layer) if handed_on else 0.0
    judge = LayerJudge(reference, target, layer=layer, criteria=criteria, incoming=incoming)
    return judge_layer(judge, _declared_sites(target, layer))


def _is_handed_on(target: CaptureSource, layer: int) -> bool:
    """Whether the layer was fed the output of another layer of the target rather than the golden's input."""
    description = target.known_description
    return description is not None and is_chained(target) and layer > description.run.span.start


def _declared_sites(target: CaptureSource, layer: int) -> tuple[Site, ...]:
    description = target.known_description
    if description is not None:
        return description.run.computed_sites
    return tuple(site for site in target.sites(layer) if site is not Site.INPUT)


def _fed_sites(target: CaptureSource) -> tuple[Site, ...]:
    description = target.known_description
    return description.run.fed_sites if description is not None else (Site.INPUT,)


def _incoming(reference: CaptureSource, target: CaptureSource, layer: int) -> float:
    """Relative error of a layer's input: the larger of all channels' and the ordinary channels'."""
    if Site.INPUT not in reference.sites(layer) or Site.INPUT not in target.sites(layer):
        return 0.0
    mask = reference.read_attention_mask()
    mine, theirs = (token_rows(source.read(layer, Site.INPUT), Site.INPUT) for source in (reference, target))
    if mine.shape != theirs.shape:
        return 0.0
    if mask is not None:
        mine, theirs = mine[mask.bool()], theirs[mask.bool()]
    ordinary = ~massive_channels(mine.flatten(0, -2))
    whole = relative_error(mine.flatten(0, -2), theirs.flatten(0, -2))
    return max(whole, relative_error(mine[..., ordinary].flatten(0, -2), theirs[..., ordinary].flatten(0, -2)))


def _compare_model(
    reference: CaptureSource, target: CaptureSource, *, criteria: Criteria, last_layer: int
) -> list[SiteResult]:
    """The sites outside the layers that the run declared."""
    description = target.known_description
    declared = description.run.model_sites if description is not None else target.model_sites()
    return [
        _judge_model_site(reference, target, site, criteria=criteria, last_layer=last_layer)
        for site in declared
        if site in target.model_sites()
    ]


def _judge_model_site(
    reference: CaptureSource, target: CaptureSource, site: ModelSite, *, criteria: Criteria, last_layer: int
) -> SiteResult:
    if site not in reference.model_sites():
        reason = "the golden was captured without it"
        return SiteResult(layer=None, site=str(site), status=SiteStatus.NOT_CAPTURED, reason=reason)
    mine, theirs = reference.read_model(site), target.read_model(site)
    if mine.shape != theirs.shape:
        reason = f"shape: expected {tuple(mine.shape)}, found {tuple(theirs.shape)}"
        return SiteResult(layer=None, site=str(site), status=SiteStatus.FAIL, reason=reason)
    rows = _model_rows(reference, target, site, mine, theirs, last_layer=last_layer)
    metrics = compare_tensors(rows.reference, rows.target, rtol=criteria.rtol, atol=criteria.atol)
    failures = criteria.classic.failures(metrics)
    noise = noise_ratio(rows) if rows.has_floor and not metrics.num_nonfinite_target else None
    if metrics.num_nonfinite_target:
        status, reason = SiteStatus.FAIL, f"{metrics.num_nonfinite_target} NaN or Inf on real rows"
    elif criteria.name == "classic":
        status, reason = judge_classic(failures)
    elif noise is not None:
        status, reason = judge_noise(noise, metrics, criteria.noise)
    else:
        status, reason = judge_without_floor(metrics, max(criteria.noise.relative_l2, rows.incoming))
    return SiteResult(
        layer=None, site=str(site), status=status, reason=reason, metrics=metrics, noise=noise, classic_failures=failures
    )


def _model_rows(
    reference: CaptureSource,
    target: CaptureSource,
    site: ModelSite,
    mine: torch.Tensor,
    theirs: torch.Tensor,
    *,
    last_layer: int,
) -> Rows:
    mask = reference.read_attention_mask()
    real = torch.ones(mine.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    twin = reference.read_model_twin(site)
    handed_on = site is not ModelSite.EMBEDDING
    return Rows(
        reference=mine[real],
        target=theirs[real],
        twin=None if twin is None else twin[real],
        error=None,
        error_ordinary=None,
        places=real.nonzero(),
        incoming=_incoming(reference, target, last_layer + 1) if handed_on else 0.0,
    )


def _blame_model(results: list[SiteResult]) -> list[Blame]:
    """The first failing site outside the layers, where no layer is to blame."""
    failed = [result for result in results if result.status is SiteStatus.FAIL]
    return [
        Blame(layer=None, sites=(result.site,), reason=f"{result.site}: {result.reason}; every layer is right")
        for result in failed[:1]
    ]


def _verdict(sites: list[SiteResult]) -> Verdict:
    statuses = {site.status for site in sites}
    if SiteStatus.FAIL in statuses:
        return Verdict.FAIL
    if not any(status.is_compared for status in statuses):
        return Verdict.INCOMPARABLE
    return Verdict.WARN if SiteStatus.WARN in statuses else Verdict.PASS


def _floor_notes(reference: CaptureSource) -> tuple[str, ...]:
    description = reference.known_description
    if description is None or description.noise_floor == "off":
        return ("the golden kept no noise floor: it is judged by fixed relative limits, which are coarser",)
    if description.noise_floor == "stats":
        return ("the golden kept only the floor's statistics: ρ is an estimate",)
    return ()


def _router_notes(reference: CaptureSource, target: CaptureSource) -> tuple[str, ...]:
    """Router dtypes that are not the golden's: they change experts without showing in any one tensor."""
    from minimax_tools.capture.reader import Capture

    if not isinstance(reference, Capture) or not isinstance(target, Capture):
        return ()
    expected = reference.description.provenance.dtypes
    return tuple(
        f"the port holds {name} in {found}, the golden in {expected[name]}"
        for name, found in sorted(target.manifest.observed_dtypes.items())
        if name in expected and found != expected[name]
    )
