"""Terminal: a comparison as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minimax_tools.errors import format_count
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import (
    ChunkedRun,
    Comparison,
    ModelFinding,
    NoiseRatio,
    PassLogits,
    SiteStatus,
)
from reports.canvas import Canvas, Column, Row
from reports.layer_tables import draw_curve, draw_layer, draw_overview, flip_sentences, word_worst
from reports.views import (
    SmallTable,
    causes_of,
    group_findings,
    group_uncompared,
    headline,
    name_sides,
    token_tables,
    view_passes,
    word_blamed_sites,
    word_cause,
    word_extent,
    word_findings,
    word_reasons,
)
from reports.wording import word_figure, word_layer, word_sites, word_untested

# More of each would push the verdict off the screen.
_MOST_BLAMED = 6  # groups of blame with their reasons, or of findings
_MOST_DETAILED_LAYERS = 4  # layers with a table of sites


def render_comparison(
    comparison: Comparison,
    *,
    width: int | None = None,
    is_terminal: bool | None = None,
    shows_metrics: bool = False,
    is_verbose: bool = False,
    further: Sequence[str] = (),
) -> str:
    """Draw a comparison as text: the verdict first, then the blame, and notes; last, of a pass, what was not tested.

    `is_verbose` adds a line for every layer, and tables of the layers that fail. `shows_metrics` adds the five classic
    figures of every layer's output, which classic criteria show always. `further` texts stand before the last line. For
    `width` and `is_terminal` see `Canvas`.
    """
    canvas = Canvas(width=width, is_terminal=is_terminal)
    canvas.verdict(comparison.verdict, headline(comparison))
    is_whole = comparison.compared == comparison.of
    canvas.paragraph(word_extent(comparison), style="" if is_whole else "yellow", indent=0)
    if comparison.chunks is not None:
        style = "yellow" if comparison.chunks.untested else ""
        canvas.paragraph(_word_chunks(comparison.chunks), style=style, indent=0)
    worst = "" if is_verbose or comparison.blame else word_worst(comparison.sites)
    if worst:
        canvas.line(worst)
    shows_criteria = is_verbose or comparison.criteria != "noise"
    canvas.facts(
        [(name, value) for name, value in name_sides(comparison) if name != "criteria" or shows_criteria]
    )
    draw_findings(canvas, comparison.findings)
    _draw_blame(canvas, comparison)
    shows_metrics = shows_metrics or comparison.criteria == "classic"
    if is_verbose or shows_metrics:
        draw_overview(canvas, comparison, shows_metrics=shows_metrics)
    draw_curve(canvas, comparison.curve, is_verbose=is_verbose)
    if is_verbose:
        _draw_details(canvas, comparison)
    _draw_next_tokens(canvas, comparison, is_verbose=is_verbose)
    _draw_uncompared(canvas, comparison)
    if comparison.notes:
        canvas.section("Notes")
        for note in comparison.notes:
            canvas.item(note)
    last = word_untested(comparison.untested) if comparison.verdict.is_passed else ""
    return "\n\n".join(filter(None, (canvas.text, *further, last)))


def draw_findings(canvas: Canvas, findings: Sequence[ModelFinding]) -> None:
    """Draw the findings of a whole port's run, the first at the front; layers with the same one are one entry."""
    if not findings:
        return
    canvas.section("What came first")
    groups = group_findings(findings)
    for group in groups[:_MOST_BLAMED]:
        cause = group[0]
        first = cause[0]
        if len(cause) == 1:
            canvas.paragraph(f"{word_findings(group)}: {first.reason}")
        else:
            canvas.paragraph(f"{word_findings(group)}: one cause, the {first.operation}")
            for finding in cause:
                canvas.paragraph(f"{finding.sites[-1]}: {finding.reason}", indent=4)
        if first.mistake is not None:
            parameters = ", ".join(f"{name} {value}" for name, value in first.parameters.items())
            canvas.paragraph(f"matches {first.mistake}{f' ({parameters})' if parameters else ''}", indent=4)
            canvas.paragraph(first.what, indent=4)
            canvas.paragraph(f"Look at {first.look_at}.", indent=4)
    if len(groups) > _MOST_BLAMED:
        canvas.paragraph(f"{format_count(len(groups) - _MOST_BLAMED, 'more finding')}; --json has all.")


def _word_chunks(chunks: ChunkedRun) -> str:
    if chunks.untested:
        return f"passes of several tokens behind a cache: not tested, {chunks.untested}"
    widths = ", ".join(map(str, chunks.widths))
    return (
        f"compared {chunks.compared} of {format_count(chunks.of, 'site')} again in chunks of {widths} tokens, each "
        "behind what the ones before have cached"
    )


def _draw_blame(canvas: Canvas, comparison: Comparison) -> None:
    if not comparison.blame:
        return
    canvas.section("To blame")
    causes = causes_of(comparison)
    for cause in causes[:_MOST_BLAMED]:
        first, *others = word_reasons(comparison, cause)
        canvas.paragraph(f"{word_cause(cause)}: {first}")
        sentences = [*others]
        for site in comparison.of_layer(cause.worst_layer):
            # A site that is wrong in chunks alone passes here, and has the figures of the other run.
            if site.site in cause.sites and site.status is not SiteStatus.PASS:
                if site.noise and math.isfinite(site.noise.token_worst):
                    sentences.append(_word_worst_token(site.site, site.noise))
                sentences += flip_sentences(site)
        for sentence in (*sentences, *cause.where):
            canvas.paragraph(sentence, indent=4)
    for cause in causes[_MOST_BLAMED:]:
        canvas.paragraph(f"{word_layers(cause.layers)}: {', '.join(word_blamed_sites(cause))}")
    behind = _sites_behind(comparison)
    if behind:
        sites = ", ".join(word_sites(behind))
        canvas.paragraph(f"Consequences, which fail behind it: {sites}. --verbose shows their figures.")


def _sites_behind(comparison: Comparison) -> tuple[str, ...]:
    """Return the sites that fail in a blamed layer, and are not to blame."""
    blamed = {(blame.layer, site) for blame in comparison.blame for site in blame.sites}
    layers = {blame.layer for blame in comparison.blame}
    behind = [
        site.site
        for site in comparison.sites
        if site.status is SiteStatus.FAIL and site.layer in layers and (site.layer, site.site) not in blamed
    ]
    return tuple(dict.fromkeys(behind))


def _word_worst_token(site: str, noise: NoiseRatio) -> str:
    row, position = noise.worst_token
    return (
        f"{site} is worst at row {row}, token {position}: ρ {word_figure(noise.token_worst)}, "
        f"where the median token has {word_figure(noise.token_median)}"
    )


def _draw_details(canvas: Canvas, comparison: Comparison) -> None:
    """Draw the layers with a failure or a warning; of too many, the blamed ones and then the first."""
    layers = dict.fromkeys(
        site.layer for site in comparison.sites if site.status in (SiteStatus.FAIL, SiteStatus.WARN)
    )
    blamed = [layer for layer in layers if any(blame.layer == layer for blame in comparison.blame)]
    shown = list(dict.fromkeys([*blamed, *layers]))[:_MOST_DETAILED_LAYERS]
    for layer in layers:
        if layer in shown:
            # The reasons of blamed sites stand under "To blame": the table does not repeat them.
            canvas.section(word_layer(layer).capitalize())
            draw_layer(canvas, comparison, layer, roles=_roles(comparison, layer))
    if len(layers) > len(shown):
        canvas.gap()
        more = format_count(len(layers) - len(shown), "more layer")
        canvas.line(f"{more} with failures or warnings; --json has every site.")


def _roles(comparison: Comparison, layer: int | None) -> dict[str, str]:
    """Return `cause` for each blamed site of a layer, with a number if the layer has several causes."""
    causes = [cause for cause in causes_of(comparison) if layer in cause.layers]
    words = ["cause"] if len(causes) == 1 else [f"cause {number}" for number in range(1, len(causes) + 1)]
    return {site: word for cause, word in zip(causes, words, strict=True) for site in cause.sites}


def _draw_next_tokens(canvas: Canvas, comparison: Comparison, *, is_verbose: bool) -> None:
    """Draw the next tokens; without `is_verbose`, what is as the golden's is counted only."""
    tables = list(token_tables(comparison))
    if not tables:
        return
    canvas.section("Next tokens")
    if comparison.pass_logits:
        draw_passes(canvas, comparison.pass_logits)
        tables = tables[1:]
    alike = [row for row in comparison.generated if row.reference is None and not row.reason]
    is_told = is_verbose or any(
        site.logits is not None and (not site.logits.is_of_head or site.logits.num_disagreeing)
        for site in comparison.sites
    )
    for table in tables:
        is_generated = table.title.startswith("Generated")
        if (len(alike) < len(comparison.generated) or is_verbose) if is_generated else is_told:
            _draw_table(canvas, table)
    if alike and not is_verbose and len(alike) == len(comparison.generated):
        tokens = format_count(sum(row.num_compared for row in alike), "generated token")
        canvas.paragraph(f"{format_count(len(alike), 'prompt')}: all {tokens} are the golden's")


def draw_passes(canvas: Canvas, passes: Sequence[PassLogits]) -> None:
    """Draw the next tokens of a run, or of each pass, against the golden's own: all layers' errors are in them."""
    first = passes[0]
    if len(passes) > 1 or first.number is not None:
        _draw_table(canvas, view_passes(passes))
        return
    row, token = first.worst_token
    canvas.paragraph(
        f"{first.num_agreeing} of {format_count(first.num_tokens, 'likeliest next token')} are the golden's; "
        f"KL divergence from the golden: mean {word_figure(first.kl_mean)} nats, worst "
        f"{word_figure(first.kl_worst)} at row {row}, token {token}. The errors of all layers are in it."
    )


def _draw_table(canvas: Canvas, table: SmallTable) -> None:
    canvas.paragraph(table.title)
    columns = tuple(Column(title=title, is_text=True, is_broken=True) for title in table.columns)
    canvas.table(columns, [Row(cells=cells) for cells in table.rows])
    canvas.gap()


def _draw_uncompared(canvas: Canvas, comparison: Comparison) -> None:
    groups = group_uncompared(comparison)
    for group in groups:
        canvas.section(group.title)
        for place in group.places:
            canvas.paragraph(f"{place} ({group.reason})" if group.reason else place)
        if group.status is SiteStatus.NOT_EXPOSED and not group.reason:
            canvas.paragraph(
                "An attribute `sites` of the port's class names their places: see docs/ports.md."
            )
