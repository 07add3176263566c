"""Judgement of excused sites (failing sites behind a failing one), each recomputed from the port's own values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from compare.blame.recompute import Recomputation
from compare.judging.judge import judge_values
from compare.judging.layer_judge import LayerJudge
from compare.noise.rows import Rows
from compare.sides.pairing import find_mismatch
from compare.sides.sides import Sides
from minimax_tools.model.sites import SITE_INPUTS, Site
from minimax_tools.results.results import SiteResult, SiteStatus


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recomputed:
    """A site judged on the port's own values of its inputs."""

    result: SiteResult
    rows: Rows | None = None  # the judged rows; None for a choice of experts, and for a wrong shape or dtype


def judge_recomputed(
    sites: tuple[Site, ...], *, layer: int, failing: frozenset[Site], judge: LayerJudge, sides: Sides
) -> Mapping[Site, Recomputed]:
    """Judge excused sites of one layer, in execution order, on the port's own values of their inputs.

    The layer's input is the golden's; `failing` are all of its failing sites. A site is left out if:

    - the golden is not mm2's own, or the weights are not known
    - a side lacks one of the site's inputs, or holds NaN or Inf there
    - the golden has no floor, and the site is the choice of experts or attention

    Raises:
        IncomparableError: The weights are another model's.
        CheckpointError: They cannot be read.
    """
    golden, source = sides.reference, sides.weights
    if not sites or source is None or sides.criteria.name == "classic" or golden.known_description is None:
        return {}
    held = set(golden.sites(layer)) & set(sides.target.sites(layer))
    with ExitStack() as stack:
        recomputation = Recomputation(
            sides, layer=layer, open_weights=lambda: stack.enter_context(source.open_layer(layer, golden))
        )
        judged: dict[Site, Recomputed] = {}
        # Sites that may be wrong by themselves; one that is right on the port's own values is not.
        doubted = set(failing)
        for site in sites:
            if not {site, *SITE_INPUTS[site]} <= held:
                continue
            recomputed = _judge(
                site,
                layer=layer,
                recomputation=recomputation,
                judge=judge,
                sides=sides,
                doubted=frozenset(doubted),
            )
            if recomputed is not None:
                judged[site] = recomputed
                if recomputed.result.status is not SiteStatus.FAIL:
                    doubted.remove(site)
    return judged


def _judge(
    site: Site,
    *,
    layer: int,
    recomputation: Recomputation,
    judge: LayerJudge,
    sides: Sides,
    doubted: frozenset[Site],
) -> Recomputed | None:
    """Judge one site on each of its possible inputs: it passes if it does on any; None if none can be computed.

    Possible are the port's values, and the golden's in place of those of `doubted` sites (see `Recomputation.rows`).
    """
    result = SiteResult(layer=layer, site=str(site), status=SiteStatus.FAIL)
    mismatch = find_mismatch(sides.reference.read(layer, site), sides.target.read(layer, site))
    if mismatch is not None:
        # A wrong shape or dtype is the site's own fault if its inputs have the right ones.
        return Recomputed(result=replace(result, reason=mismatch)) if recomputation.has_inputs(site) else None
    if site is Site.ROUTER_EXPERTS:
        choice = None if judge.router_noise is None else recomputation.choice(judge.router_noise)
        return (
            None if choice is None else Recomputed(result=_name_inputs(judge.judge_choice(result, *choice)))
        )
    first: Recomputed | None = None
    for rows in recomputation.rows(site, judge.stored_rows(site), doubted=doubted):
        judged = judge_values(result, rows, criteria=sides.criteria, context=judge.limit_context(site))
        recomputed = Recomputed(result=_name_inputs(judged), rows=rows)
        if judged.status is not SiteStatus.FAIL:
            return recomputed
        first = first or recomputed
    return first


def _name_inputs(result: SiteResult) -> SiteResult:
    """Add the inputs that a result rests on to its reason."""
    if not result.reason:
        return result
    inputs = sorted(SITE_INPUTS[Site(result.site)], key=lambda site: site.order)
    names = ", ".join(str(site) for site in inputs)
    return replace(result, reason=f"{result.reason}, given the port's own {names}")
