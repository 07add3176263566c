"""Collection: all evidence of a judged run for its report, and the choice of the sites to look at.

An error is the port's value minus the float32 twin's; without a twin, minus the golden's. A flip is a token for which
the port chose other experts than the golden. T judged tokens, F channels, k experts of each token, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import torch

from compare.comparer import JudgedRun
from compare.judging.layer_judge import LayerJudge
from compare.judging.logits import divergences, foreseen_divergence, logit_noise
from compare.judging.model_judge import ModelJudge
from compare.judging.routing import flipped_tokens
from compare.noise.rows import Rows
from compare.sides.golden_weights import CheckpointWeights, keep_layer_open
from compare.sides.port_head import on_port_input, on_port_output
from minimax_tools.hub.checkpoint_folder import resolve_config
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.printable import printable
from minimax_tools.results.results import Comparison, SiteResult, SiteStatus
from minimax_tools.text.tokenizer import decode_rows, has_tokenizer
from reports.page.evidence import (
    ErrorHistogram,
    ErrorPicture,
    Evidence,
    FlipPoint,
    LayerRouting,
    LogitsEvidence,
    SiteErrors,
    TokenChance,
    TopTokens,
    WorstElement,
)

# Places whose likeliest tokens are told, and how many tokens of each.
_MOST_PLACES, _MOST_TOKENS = 6, 5
# Tokens of a chart; more would make the page slow.
_MOST_POINTS = 4096


def collect_logits(run: JudgedRun, *, folder: Path | None) -> LogitsEvidence | None:
    """Collect the next-token distributions; None if a side holds no logits that can be compared.

    `folder` holds the tokenizer that tells the tokens' text; None for numbers alone.
    """
    layers = run.comparison.layers
    if not layers:
        return None
    judge = ModelJudge(run.sides, last_layer=max(layers))
    rows = judge.read_logits()
    if rows is None or rows.num_tokens == 0:
        return None
    divergence = divergences(rows.reference, rows.target)
    noise = logit_noise(rows, usual_error=judge.usual_error)
    foreseen = foreseen_divergence(rows, noise)
    kept = slice(0, _MOST_POINTS)
    worst = divergence.argsort(descending=True, stable=True)[:_MOST_PLACES].tolist()
    return LogitsEvidence(
        rows=tuple(rows.places[kept, 0].tolist()),
        positions=tuple(rows.places[kept, 1].tolist()),
        divergence=tuple(divergence[kept].tolist()),
        foreseen=tuple(foreseen[kept].tolist()),
        top=tuple(
            TopTokens(
                row=int(rows.places[token, 0]),
                position=int(rows.places[token, 1]),
                divergence=float(divergence[token]),
                golden=_likeliest(rows.reference[token], folder),
                port=_likeliest(rows.target[token], folder),
            )
            for token in worst
        ),
    )


def _likeliest(logits: torch.Tensor, folder: Path | None) -> tuple[TokenChance, ...]:
    """Return the likeliest tokens by logits [V], with their text if the folder holds a tokenizer."""
    best = logits.double().softmax(dim=-1).topk(min(_MOST_TOKENS, len(logits)))
    tokens = best.indices.tolist()
    texts = [""] * len(tokens)
    if folder is not None and has_tokenizer(folder):
        texts = [printable(text, keep="") for text in decode_rows(folder, [[token] for token in tokens])]
    return tuple(
        TokenChance(token=token, text=text, probability=probability)
        for token, text, probability in zip(tokens, texts, best.values.tolist(), strict=True)
    )


# Flips that are told of each layer.
_MOST_FLIPS = 64


def collect_routing(run: JudgedRun) -> tuple[LayerRouting, ...]:
    """Collect the experts of every layer in which both sides show them."""
    shown = (
        layer
        for layer in sorted(run.inputs)
        if all(Site.ROUTER_EXPERTS in side.sites(layer) for side in (run.sides.reference, run.sides.target))
    )
    found = (_collect_layer(run, layer) for layer in shown)
    return tuple(routing for routing in found if routing is not None)


def _collect_layer(run: JudgedRun, layer: int) -> LayerRouting | None:
    """Collect the experts of one layer; None if the sides' shapes differ."""
    judge = LayerJudge(run.sides, layer=layer, layer_input=run.inputs[layer])
    if judge.experts is None:
        return None
    golden, port = judge.experts
    num_experts = 1 + max(int(golden.max()), int(port.max()))
    logits = Site.ROUTER_LOGITS
    if logits in run.sides.reference.sites(layer):
        num_experts = max(num_experts, run.sides.reference.read(layer, logits).shape[-1])
    noise = judge.choice_noise
    flipped = flipped_tokens(golden, port)
    flips: list[FlipPoint] = []
    if noise is not None:
        margin = noise.flip_margin(golden, port)
        is_explained = noise.is_within_reach(margin)
        places = judge.choice_places()
        indices = flipped.nonzero().flatten()
        for token in indices[margin[indices].argsort(descending=True, stable=True)][:_MOST_FLIPS].tolist():
            row, position = places[token].tolist()
            flips.append(
                FlipPoint(
                    row=row,
                    position=position,
                    margin=float(margin[token]),
                    is_explained=bool(is_explained[token]),
                )
            )
    return LayerRouting(
        layer=layer,
        golden_load=_load(golden, num_experts),
        port_load=_load(port, num_experts),
        is_inherited=run.inputs[layer].is_inherited,
        reach=None if noise is None else float(noise.reach.median()),
        flips=tuple(flips),
    )


def _load(experts: torch.Tensor, num_experts: int) -> tuple[int, ...]:
    """Count the tokens of each expert, from [T,k]; numbers that are no expert's are left out."""
    numbers = experts.long().flatten()
    return tuple(torch.bincount(numbers[numbers >= 0], minlength=num_experts).tolist())


# Blocks of a picture: as many as a chart of a screen's width can show, and few enough to draw at once.
_MOST_TOKEN_BLOCKS, _MOST_CHANNEL_BLOCKS = 32, 64
_NUM_BINS = 40
# Errors this much smaller than the largest share the lowest bin.
_SPAN = 1e-8
_MOST_WORST = 12
_MOST_MASSIVE = 32


def measure_site(
    rows: Rows, *, layer: int | None, site: str, why: str, head_dim: int | None = None
) -> SiteErrors:
    """Measure the errors of one site from its judged rows, at least one; `why` is the reason to look at it.

    `head_dim` is the number of a head's channels, for sites whose channels are heads side by side.
    """
    exact = (rows.reference if rows.twin is None else rows.twin).float()
    error, noise = rows.target.float() - exact, rows.reference.float() - exact
    return SiteErrors(
        layer=layer,
        site=site,
        why=why,
        num_tokens=error.shape[0],
        num_channels=error.shape[1],
        has_twin=rows.twin is not None,
        histogram=_count(error, noise, has_twin=rows.twin is not None),
        picture=_draw(error, noise, rows),
        worst=_find_worst(error, rows, head_dim=head_dim),
    )


def _count(error: torch.Tensor, noise: torch.Tensor, *, has_twin: bool) -> ErrorHistogram:
    """Count elements by the size of their error; NaN and Inf are left out."""
    sizes, golden = (values[values.isfinite()].abs() for values in (error, noise))
    found = [values[values > 0.0] for values in (sizes, golden)]
    largest = max((float(values.max()) for values in found if len(values)), default=1.0)
    smallest = min((float(values.min()) for values in found if len(values)), default=largest / 10.0)
    low = math.log10(max(smallest, largest * _SPAN))
    # The largest size lies within the last bin, in spite of rounding.
    high = max(math.log10(largest), low + 0.1) + 1e-4
    edges = torch.linspace(low, high, _NUM_BINS + 1, dtype=torch.float64)
    port_counts, golden_counts = (
        tuple(torch.histc(values.log10().clamp(low, high), _NUM_BINS, low, high).long().tolist())
        for values in found
    )
    return ErrorHistogram(
        edges=tuple((10.0**edges).tolist()),
        port=port_counts,
        golden=golden_counts if has_twin else (),
        num_equal=int((sizes == 0.0).sum()),
        num_equal_golden=int((golden == 0.0).sum()) if has_twin else 0,
    )


def _draw(error: torch.Tensor, noise: torch.Tensor, rows: Rows) -> ErrorPicture:
    """Average the squared error over blocks of tokens and channels."""
    num_tokens, num_channels = error.shape
    tokens = _starts(num_tokens, _MOST_TOKEN_BLOCKS)
    channels = _starts(num_channels, _MOST_CHANNEL_BLOCKS)
    floor, unit = _root_mean_square(noise), "the noise"
    if floor == 0.0:  # no twin, or a site at which nothing is rounded
        floor, unit = _root_mean_square(rows.reference.float()) or 1.0, "the golden's values"
    squares = error.square()
    by_block = torch.stack([squares[first:last].sum(dim=0) for first, last in itertools.pairwise(tokens)])
    sums = torch.stack(
        [by_block[:, first:last].sum(dim=1) for first, last in itertools.pairwise(channels)], dim=1
    )
    heights, widths = torch.tensor(tokens).diff(), torch.tensor(channels).diff()
    return ErrorPicture(
        unit=unit,
        token_starts=tokens,
        token_names=tuple(
            _name_tokens(rows.places, first, last) for first, last in itertools.pairwise(tokens)
        ),
        channel_starts=channels,
        blocks=tuple(map(tuple, ((sums / (heights[:, None] * widths[None, :])).sqrt() / floor).tolist())),
        by_token=tuple(((sums.sum(dim=1) / (heights * num_channels)).sqrt() / floor).tolist()),
        by_channel=tuple(((sums.sum(dim=0) / (widths * num_tokens)).sqrt() / floor).tolist()),
        massive=tuple(rows.massive.nonzero().flatten().tolist()[:_MOST_MASSIVE]),
    )


def _root_mean_square(values: torch.Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.double().square().mean().sqrt()) if len(finite) else 0.0


def _starts(count: int, most: int) -> tuple[int, ...]:
    """Return the first index of each of at most `most` blocks of nearly one size, and the end of the last."""
    blocks = min(count, most)
    return tuple(count * block // blocks for block in range(blocks + 1))


def _name_tokens(places: torch.Tensor, first: int, last: int) -> str:
    row, position = places[first].tolist()
    end_row, end_position = places[last - 1].tolist()
    begin = f"row {row}, token {position}"
    if last - first == 1:
        return begin
    return (
        f"{begin} to {end_position}" if row == end_row else f"{begin} to row {end_row}, token {end_position}"
    )


def _find_worst(error: torch.Tensor, rows: Rows, *, head_dim: int | None) -> tuple[WorstElement, ...]:
    """Return the elements with the largest error, NaN and Inf before all others."""
    sizes = error.abs().nan_to_num(nan=math.inf).flatten()
    worst = sizes.topk(min(_MOST_WORST, len(sizes))).indices
    found = []
    for flat in worst.tolist():
        token, channel = divmod(flat, error.shape[1])
        row, position = rows.places[token].tolist()
        head = "" if head_dim is None else f" (head {channel // head_dim}, dim {channel % head_dim})"
        found.append(
            WorstElement(
                row=row,
                position=position,
                place=f"{channel}{head}",
                golden=float(rows.reference[token, channel]),
                port=float(rows.target[token, channel]),
                twin=None if rows.twin is None else float(rows.twin[token, channel]),
                error=float(error[token, channel]),
            )
        )
    return tuple(found)


# Sites whose errors are shown element by element.
_MOST_SITES = 8
# Of sites that nobody is blamed for, so many.
_MOST_UNBLAMED = 3


def collect_evidence(run: JudgedRun) -> Evidence:
    """Collect what the captures of a judged run show beside its figures."""
    weights = run.sides.weights
    folder = resolve_config(weights.model) if isinstance(weights, CheckpointWeights) else None
    with keep_layer_open(weights) as source, torch.no_grad():
        opened = replace(run, sides=replace(run.sides, weights=source))
        errors, notes = [], []
        for result, why in _choose(run.comparison):
            found = _measure(opened, result, why)
            if found is not None:
                errors.append(found)
                continue
            place = "model" if result.layer is None else f"layer {result.layer}"
            reason = result.reason or "it holds no values to subtract"
            notes.append(f"{place}, {result.site}: its errors cannot be shown element by element: {reason}")
        return Evidence(
            sites=tuple(errors),
            routing=collect_routing(opened),
            logits=collect_logits(opened, folder=folder),
            notes=tuple(notes),
        )


def _choose(comparison: Comparison) -> list[tuple[SiteResult, str]]:
    """Choose sites to look at, and say why: the blamed ones, or the first that fail or warn, or the nearest to it."""
    by_place = {(site.layer, site.site): site for site in comparison.sites if _has_errors(site)}
    blamed = [
        (by_place[layer, site], why) for layer, site, why in _blamed(comparison) if (layer, site) in by_place
    ]
    if blamed:
        return blamed[:_MOST_SITES]
    measured = [site for site in by_place.values() if site.metrics is not None]
    for status, why in ((SiteStatus.FAIL, "fails"), (SiteStatus.WARN, "warns")):
        found = [(site, why) for site in measured if site.status is status]
        if found:
            return found[:_MOST_UNBLAMED]
    limited = [(site.nearest.excess, site) for site in measured if site.nearest is not None]
    nearest = max(limited, key=itemgetter(0), default=None)
    return [] if nearest is None else [(nearest[1], "nearest to its limit, and within it")]


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


def _measure(run: JudgedRun, result: SiteResult, why: str) -> SiteErrors | None:
    """Measure the errors of one site; None if the sides' values cannot be subtracted."""
    read = _model_rows if result.layer is None else _layer_rows
    rows = read(run, result)
    if rows is None or rows.num_tokens == 0:
        return None
    head_dim = None
    if result.layer is not None and Site(result.site).has_heads_dim:
        head_dim = run.sides.reference.read(result.layer, Site(result.site)).shape[-1]
    return measure_site(rows, layer=result.layer, site=result.site, why=why, head_dim=head_dim)


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
