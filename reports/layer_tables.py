"""Layer tables: a line for each layer of a comparison, the sites in a layer that fail or warn, and a chain's errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from minimax_tools.errors import format_count
from minimax_tools.metrics.pair_metrics import PairMetrics
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import (
    Comparison,
    Curve,
    CurvePoint,
    Flip,
    NoiseRatio,
    SiteResult,
    SiteStatus,
)
from reports.canvas import Canvas, Row, columns
from reports.views import LayerView, largest_rho, view_layers
from reports.wording import word_figure, word_fraction, word_index, word_place

# Rows of the table; a longer one would hide the onset, the first layer that adds more than noise.
_MOST_ROWS = 16
_COLUMNS = columns("layer", "error", "inherited", "floor", "ρ", "<")


def draw_curve(canvas: Canvas, curve: Curve | None, *, is_verbose: bool) -> None:
    """Draw the onset of errors, and with `is_verbose` the curve as a table; nothing for an isolated run."""
    if curve is None:
        return
    canvas.section("Error along the chain")
    if is_verbose:
        shown = _select_points(curve)
        canvas.table(_COLUMNS, [_row(point, is_onset=point.layer == curve.onset) for point in shown])
        if len(shown) < len(curve.points):
            canvas.paragraph(
                f"{len(curve.points) - len(shown)} more layers: --json has them all.", style="dim"
            )
    if curve.onset is None:
        canvas.paragraph("No layer adds more than noise to its inherited error.")
        return
    alone = " Run it alone to see its mistake." if curve.command else ""
    canvas.paragraph(f"Errors beyond noise begin at layer {curve.onset}.{alone}")


def _select_points(curve: Curve) -> tuple[CurvePoint, ...]:
    """Return all points; of many, the first, the last and those around the onset (without an onset, the last ones)."""
    points = curve.points
    if len(points) <= _MOST_ROWS:
        return points
    layers = [point.layer for point in points]
    # Between the first and the last, _MOST_ROWS - 2 points follow each other.
    middle = layers.index(curve.onset) if curve.onset in layers else len(points)
    start = min(max(middle - _MOST_ROWS // 2, 1), len(points) - _MOST_ROWS + 1)
    return (points[0], *points[start : start + _MOST_ROWS - 2], points[-1])


def _row(point: CurvePoint, *, is_onset: bool) -> Row:
    cells = (
        str(point.layer),
        word_figure(point.error),
        word_figure(point.handed_on),  # error of the layer's input
        word_figure(point.floor),
        word_figure(point.ratio),  # ρ; the error in units of its limit if the golden kept no floor
        "onset" if is_onset else "",
    )
    return Row(cells=cells, style="red" if is_onset else "")


# Styles of sites that fail or warn: `status in _STYLES` is true for them alone.
_STYLES = {SiteStatus.FAIL: "red", SiteStatus.WARN: "yellow"}
# Flips (tokens with other experts than the golden's) that are named for a layer.
_MOST_FLIPS = 3
_COSINE_DECIMALS = 6
_NORM_DECIMALS = 4
_PERCENT_DECIMALS = 2
# Sites whose classic figures a layer's line shows.
_METRIC_SITES = (Site.OUTPUT, ModelSite.LOGITS)

_SITE_COLUMNS = columns(
    "<",
    "<site",
    "ρ\nwhole",
    "ρ\nordinary",
    "ρ\ntoken p99",
    "norm\nratio",
    "\ncosine",
    "max\n|diff|",
    "worst\nat",
)
_METRIC_TITLES = ("max\n|diff|", "mean\n|diff|", "close\n%", "output\ncosine", "output\nPearson")
_METRIC_LEGEND = (
    "|diff|, close, cosine and Pearson: golden against port, of the layer's output and of the model's logits. close: "
    "elements within atol + rtol * |golden|."
)


def draw_overview(canvas: Canvas, comparison: Comparison, *, shows_metrics: bool) -> None:
    """Draw a line for each layer: its verdict, the number of sites compared, and its worst site.

    With `shows_metrics`, the line has the five classic figures of the layer's output too.
    """
    layers = view_layers(comparison)
    if not layers:
        return
    has_noise = any(site.noise for site in comparison.sites)
    shows_worst = has_noise or not shows_metrics
    # The classic limits judge outputs alone, whose figures the line has already.
    has_suspects = shows_worst and any(site.status in _STYLES for site in comparison.sites)
    titles = ["layer", "<verdict", "compared"]
    if shows_metrics:
        titles += _METRIC_TITLES
    if shows_worst:
        worst = "largest ρ" if has_noise else "lowest cosine"
        titles += [worst, "<site"]
    if has_suspects:
        titles.append("<fails or warns")
    rows = []
    for layer in layers:
        cells = [layer.name, _status_word(layer.status), layer.compared]
        if shows_metrics:
            cells += _metric_cells([site.metrics for site in layer.sites if site.site in _METRIC_SITES])
        if shows_worst:
            cells += _worst_cells(layer.sites, has_noise=has_noise)
        if has_suspects:
            cells.append(_suspects_word(layer.sites))
        # Without a status no site was compared.
        style = _STYLES.get(layer.status, "") if layer.status else "yellow"
        rows.append(Row(cells=tuple(cells), style=style))
    canvas.gap()
    canvas.table(columns(*titles), rows)
    if shows_metrics:
        canvas.gap()
        canvas.paragraph(_METRIC_LEGEND, style="dim")
        _draw_own_input_metrics(canvas, layers)
    if has_noise:
        canvas.gap()
        canvas.paragraph(_legend(comparison), style="dim")


def _draw_own_input_metrics(canvas: Canvas, layers: Sequence[LayerView]) -> None:
    """Draw the five figures of each layer on the port's own input, if it is judged by that, as in a chained run."""
    rows = []
    for layer in layers:
        measured = [site.own_input_metrics for site in layer.sites if site.site in _METRIC_SITES]
        if any(measured):
            rows.append(Row(cells=(layer.name, *_metric_cells(measured))))
    if rows:
        canvas.section("On the port's own input: the error of each layer alone")
        canvas.table(columns("layer", *_METRIC_TITLES), rows)


def word_worst(sites: Sequence[SiteResult]) -> str:
    """Return the largest ρ among sites in words, with its place; empty if none has a noise floor."""
    worst = largest_rho(sites)
    return f"largest ρ {_word_rho(worst.noise)} ({word_place(worst.layer, [worst.site])})" if worst else ""


def draw_layer(
    canvas: Canvas, comparison: Comparison, layer: int | None, *, roles: Mapping[str, str]
) -> None:
    """Draw the sites of a layer that fail or warn, with the verdict of the classic limits (fixed ones, as cosine 0.99).

    `roles` names the blamed sites of the layer, as `cause` or `cause 2`: their reasons stand in the blame already.
    """
    sites = comparison.of_layer(layer)
    suspects = [site for site in sites if site.status in _STYLES]
    canvas.table(_SITE_COLUMNS, [_site_row(site, roles=roles) for site in suspects])
    for site in suspects:
        # In a blamed layer the other failures are consequences: their figures are enough.
        is_behind = bool(roles) and site.status is SiteStatus.FAIL and site.noise is not None
        for sentence in _sentences(site, with_reason=site.site not in roles and not is_behind):
            canvas.paragraph(f"{site.site}: {sentence}")
    classic_sentences = [] if comparison.criteria == "classic" else _classic_sentences(sites)
    for sentence in (*_token_sentences(sites), *classic_sentences):
        canvas.paragraph(sentence)
    passing = [site for site in sites if site.status is SiteStatus.PASS]
    if passing:
        canvas.paragraph(_passing_sentence(passing), style="dim")


def _metric_cells(measured: Iterable[PairMetrics | None]) -> tuple[str, ...]:
    """Return the five figures of a layer's output or of the logits; `-` if not measured, or if all are NaN or Inf."""
    metrics = next(filter(None, measured), None)
    if metrics is None or metrics.num_nonfinite_target == metrics.num_elements:
        return ("-",) * len(_METRIC_TITLES)
    return (
        word_figure(metrics.max_abs_diff),
        word_figure(metrics.mean_abs_diff),
        word_fraction(100.0 * metrics.close_fraction, decimals=_PERCENT_DECIMALS),
        word_fraction(metrics.cosine_similarity, decimals=_COSINE_DECIMALS),
        word_fraction(metrics.pearson_correlation, decimals=_COSINE_DECIMALS),
    )


def _worst_cells(sites: Sequence[SiteResult], *, has_noise: bool) -> tuple[str, str]:
    worst = largest_rho(sites) if has_noise else _lowest_cosine(sites)
    if worst is None:
        return "-", "-"
    return _word_rho(worst.noise) if has_noise else _word_cosine(worst), worst.site


def _site_row(site: SiteResult, *, roles: Mapping[str, str]) -> Row:
    noise, metrics = site.noise, site.metrics
    if metrics is not None and metrics.num_nonfinite_target == metrics.num_elements:
        # Figures over no finite element would look as if nothing differed.
        metrics = None
    cells = (
        _role_word(site, roles),
        site.site,
        _word_rho(noise),
        word_figure(noise.ordinary if noise else None),
        word_figure(noise.token_p99 if noise else None),
        word_fraction(metrics.norm_ratio if metrics else None, decimals=_NORM_DECIMALS),
        _word_cosine(site),
        word_figure(metrics.max_abs_diff if metrics else None),
        word_index(metrics.worst_index) if metrics else "-",
    )
    return Row(cells=cells, style=_STYLES[site.status])


def _role_word(site: SiteResult, roles: Mapping[str, str]) -> str:
    """Return the role of a blamed site, `behind` for another that fails where one is blamed, else its status."""
    if not roles or site.status is not SiteStatus.FAIL:
        return _status_word(site.status)
    return roles.get(site.site, "behind")


def _sentences(site: SiteResult, *, with_reason: bool) -> list[str]:
    """Return sentences on what the figures in a site's row do not show."""
    sentences = [site.reason] if with_reason and site.reason else []
    metrics = site.judged_metrics
    if metrics and (metrics.num_nonfinite_target or metrics.num_nonfinite_reference):
        sentences.append(
            f"{metrics.num_nonfinite_target} of {metrics.num_elements} elements are NaN or Inf "
            f"in the port, {metrics.num_nonfinite_reference} in the golden; "
            "the figures leave them out"
        )
    return [*sentences, *flip_sentences(site)]


def flip_sentences(site: SiteResult) -> list[str]:
    """Return sentences on the tokens that have other experts; none for a site that chooses none."""
    if not site.routing:
        return []
    return [
        f"{site.routing.num_flipped} of {site.routing.num_tokens} tokens have other experts, "
        f"{site.routing.num_explained} of them within the noise",
        *(_word_flip(flip) for flip in site.routing.worst_flips[:_MOST_FLIPS]),
    ]


def _token_sentences(sites: Sequence[SiteResult]) -> list[str]:
    """Return sentences on tokens with other experts: judged by replay, or left out."""
    replayed = max((site.num_replayed for site in sites), default=0)
    left_out = {site.site: site.num_set_aside for site in sites if site.num_set_aside}
    sentences = []
    if replayed:
        tokens = format_count(replayed, "token")
        sentences.append(f"Judged against the golden with the port's own experts: {tokens}.")
    if left_out:
        tokens = format_count(max(left_out.values()), "token")
        sentences.append(f"Left out of {', '.join(left_out)}: {tokens} with, perhaps, other experts.")
    return sentences


def _word_flip(flip: Flip) -> str:
    chosen, dropped = (", ".join(map(str, experts)) or "none" for experts in (flip.chosen, flip.dropped))
    margin = "" if flip.margin is None else f", {word_figure(flip.margin)} apart in score"
    return f"row {flip.row}, token {flip.position}: {chosen} for {dropped}{margin}"


def _classic_sentences(sites: Sequence[SiteResult]) -> list[str]:
    """Return the classic limits' verdict on a failing layer's output, and the failures that they miss."""
    failing = [site for site in sites if site.status is SiteStatus.FAIL and site.routing is None]
    if not failing:
        return []
    sentences = [
        f"The classic limits fail this layer's output too: {'; '.join(site.classic_failures)}."
        if site.classic_failures
        else f"The classic limits pass this layer's output: cosine {_word_cosine(site)}."
        for site in sites
        if site.site == "output" and site.metrics
    ]
    passing = [site.site for site in failing if site.metrics and not site.classic_failures]
    if passing:
        sentences.append(f"The classic limits pass {', '.join(passing)}, which fails here.")
    return sentences


def _passing_sentence(passing: Sequence[SiteResult]) -> str:
    words = f"{len(passing)} other sites pass" if len(passing) > 1 else f"{passing[0].site} passes"
    worst = largest_rho(passing)
    return f"{words}, largest ρ {_word_rho(worst.noise)} ({worst.site})." if worst else f"{words}."


def _lowest_cosine(sites: Sequence[SiteResult]) -> SiteResult | None:
    known = [
        (site.metrics.cosine_similarity, site)
        for site in sites
        if site.metrics and site.metrics.cosine_similarity is not None
    ]
    return min(known, key=itemgetter(0))[1] if known else None


def _status_word(status: SiteStatus | None) -> str:
    if status is None:
        return "none"
    return str(status).upper() if status in _STYLES else str(status)


def _suspects_word(sites: Sequence[SiteResult]) -> str:
    """Return the earliest site that fails, or else warns, and the number of further ones."""
    suspects = [site for site in sites if site.status in _STYLES]
    if not suspects:
        return ""
    first = next((site for site in suspects if site.status is SiteStatus.FAIL), suspects[0])
    return first.site + (f" and {len(suspects) - 1} more" if len(suspects) > 1 else "")


def _word_rho(noise: NoiseRatio | None) -> str:
    if noise is None:
        return "-"
    return ("~" if noise.is_estimated else "") + word_figure(noise.whole)


def _word_cosine(site: SiteResult) -> str:
    return word_fraction(site.metrics.cosine_similarity if site.metrics else None, decimals=_COSINE_DECIMALS)


def _legend(comparison: Comparison) -> str:
    legend = "ρ: the port's error over what BF16 alone costs the golden; 1 is as good as the golden."
    if any(site.status in _STYLES for site in comparison.sites):
        legend += " ordinary: without the massive channels. token p99: 99 % of the tokens are better."
    noises = [site.noise for site in comparison.sites if site.noise]
    if comparison.blame:
        legend += " cause: a site to blame. behind: a site that fails as its consequence."
    if any(noise.is_estimated for noise in noises):
        legend += " ~: estimated, since the golden keeps no float32 twin of it."
    if any(noise.incoming for noise in noises):
        legend += " A chained layer's floor is widened by the error that it inherited."
    return legend
