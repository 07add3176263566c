"""Collection: all evidence of a judged run for its report, and the choice of the sites to look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from compare.comparer import JudgedRun
from compare.evidence.divergence import collect_logits
from compare.evidence.expert_choices import collect_routing
from compare.evidence.site_errors import measure_site
from compare.judging.layer_judge import LayerJudge
from compare.judging.model_judge import ModelJudge
from compare.noise.rows import Rows
from compare.sides.golden_weights import CheckpointWeights, keep_layer_open
from compare.sides.port_head import on_port_output
from compare.sides.port_input import on_port_input
from minimax_tools.hub.checkpoint_folder import resolve_config
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus
from reports.page.evidence import Evidence, SiteErrors

# Sites whose errors are shown element by element.
_MOST_SITES = 8
# Of sites that nobody is blamed for, so many.
_MOST_UNBLAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """A site to look at, and why."""

    result: SiteResult
    why: str


def collect_evidence(run: JudgedRun) -> Evidence:
    """Collect what the captures of a judged run show beside its figures.

    Raises:
        CheckpointError: The weights that judged the run cannot be read any more.
        CaptureError: A file is missing or damaged.
    """
    weights = run.sides.weights
    folder = resolve_config(weights.model) if isinstance(weights, CheckpointWeights) else None
    with keep_layer_open(weights) as source, torch.no_grad():
        opened = replace(run, sides=replace(run.sides, weights=source))
        errors, notes = [], []
        for chosen in _choose(run.comparison):
            found = _measure(opened, chosen)
            if found is None:
                place = f"{'model' if chosen.result.layer is None else f'layer {chosen.result.layer}'}"
                notes.append(
                    f"{place}, {chosen.result.site}: its errors cannot be shown element by element: "
                    f"{chosen.result.reason or 'it holds no values to subtract'}"
                )
            else:
                errors.append(found)
        return Evidence(
            sites=tuple(errors),
            routing=collect_routing(opened),
            logits=collect_logits(opened, folder=folder),
            notes=tuple(notes),
        )


def _choose(comparison: Comparison) -> list[_Chosen]:
    """Choose the sites to look at: those to blame; without blame the first that fail or warn, or the nearest to it."""
    by_place = {(site.layer, site.site): site for site in comparison.sites}
    blamed = [
        _Chosen(result=by_place[layer, site], why=why)
        for layer, site, why in _blamed(comparison)
        if (layer, site) in by_place and _has_errors(by_place[layer, site])
    ]
    if blamed:
        return blamed[:_MOST_SITES]
    measured = [site for site in comparison.sites if site.metrics is not None and _has_errors(site)]
    for status, why in ((SiteStatus.FAIL, "fails"), (SiteStatus.WARN, "warns")):
        found = [_Chosen(result=site, why=why) for site in measured if site.status is status]
        if found:
            return found[:_MOST_UNBLAMED]
    limited = [(site.nearest.excess, site) for site in measured if site.nearest is not None]
    if not limited:
        return []
    _, nearest = max(limited, key=lambda pair: pair[0])
    return [_Chosen(result=nearest, why="nearest to its limit, and within it")]


def _has_errors(result: SiteResult) -> bool:
    """Decide whether a site was compared, and holds values rather than numbers of experts."""
    return result.status.is_compared and result.routing is None


def _blamed(comparison: Comparison) -> Iterator[tuple[int | None, str, str]]:
    """Yield layer and site of what is to blame: of each group the worst layer, then the first."""
    groups = comparison.blame_groups
    for group in groups:
        for site in group.sites:
            more = f", the worst of {len(group.layers)} layers" if len(group.layers) > 1 else ""
            yield group.worst_layer, site, f"to blame{more}"
    for group in groups:
        if group.layers[0] != group.worst_layer:
            for site in group.sites:
                yield group.layers[0], site, f"to blame, the first of {len(group.layers)} layers"


def _measure(run: JudgedRun, chosen: _Chosen) -> SiteErrors | None:
    """Measure the errors of one site; None if the sides' values cannot be subtracted."""
    result = chosen.result
    read = _model_rows if result.layer is None else _layer_rows
    rows = read(run, result)
    if rows is None or rows.num_tokens == 0:
        return None
    head_dim = None
    if result.layer is not None and Site(result.site).has_heads_dim:
        head_dim = run.sides.reference.read(result.layer, Site(result.site)).shape[-1]
    return measure_site(rows, layer=result.layer, site=result.site, why=chosen.why, head_dim=head_dim)


def _layer_rows(run: JudgedRun, result: SiteResult) -> Rows | None:
    """Read the rows by which a site of a layer was judged: of a chained layer those on the port's own input."""
    layer = result.layer
    if layer is None or layer not in run.inputs:
        return None
    sides, layer_input = run.sides, run.inputs[layer]
    port_sides = on_port_input(sides, layer) if layer_input.is_inherited else None
    if port_sides is not None:
        sides, layer_input = port_sides, replace(layer_input, error=None)
    return LayerJudge(sides, layer=layer, layer_input=layer_input).judged_rows(Site(result.site))


def _model_rows(run: JudgedRun, result: SiteResult) -> Rows | None:
    site, layers = ModelSite(result.site), run.comparison.layers
    if not layers:
        return None
    sides = run.sides if site is ModelSite.EMBEDDING else on_port_output(run.sides, max(layers)) or run.sides
    return ModelJudge(sides, last_layer=max(layers)).judged_rows(site)
