"""Terminal: a comparison as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from minimax_tools.errors import format_count
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import (
    NOT_EXPOSED,
    BlameGroup,
    Comparison,
    GeneratedRow,
    LogitsResult,
    NoiseRatio,
    SiteResult,
    SiteStatus,
    Verdict,
)
from reports.canvas import Canvas
from reports.layer_tables import draw_curve, draw_layer, draw_overview, flip_sentences, worst_site
from reports.model_findings import draw_findings, draw_passes, word_chunks, word_first
from reports.wording import (
    causes_of,
    word_blamed_sites,
    word_cause,
    word_figure,
    word_layer,
    word_place,
    word_port,
    word_reasons,
    word_sites,
    word_sites_by_layer,
    word_untested,
)

# More of each would push the verdict off the screen.
_MOST_BLAMED = 6  # groups of blame with their reasons
_MOST_DETAILED_LAYERS = 4  # layers with a table of sites
_MOST_NAMED = 3  # tokens with another likeliest choice

_VERDICT_STYLES = {
    Verdict.PASS: "bold green",
    Verdict.WARN: "bold yellow",
    Verdict.FAIL: "bold red",
    Verdict.INCOMPARABLE: "bold red",
}
_UNCOMPARED_WORDS = {
    SiteStatus.NOT_EXPOSED: "Not exposed by the port",
    SiteStatus.NOT_CAPTURED: "Not captured by the golden",
    SiteStatus.NOT_JUDGED: "Not judged",
}


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
    canvas.line(_headline(comparison), style=_VERDICT_STYLES[comparison.verdict])
    is_whole = comparison.compared == comparison.of
    canvas.paragraph(_extent(comparison), style="" if is_whole else "yellow", indent=0)
    if comparison.chunks is not None:
        canvas.paragraph(
            word_chunks(comparison.chunks), style="yellow" if comparison.chunks.untested else "", indent=0
        )
    worst = "" if is_verbose or comparison.blame else worst_site(comparison.sites)
    if worst:
        canvas.line(worst)
    canvas.facts(
        [
            ("golden", comparison.reference),
            ("run", comparison.target),
            *([("port", word_port(comparison.port))] if comparison.port else []),
            *([("criteria", comparison.criteria)] if is_verbose or comparison.criteria != "noise" else []),
            *([("tokens", comparison.tokens)] if comparison.tokens else []),
        ]
    )
    draw_findings(canvas, comparison.findings)
    _draw_blame(canvas, comparison)
    is_classic = comparison.criteria == "classic"
    if is_verbose or shows_metrics or is_classic:
        draw_overview(canvas, comparison, shows_metrics=shows_metrics or is_classic)
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


def _headline(comparison: Comparison) -> str:
    verdict = str(comparison.verdict).upper()
    if comparison.findings:
        return f"{verdict}: {word_first(comparison.findings)}"
    causes = causes_of(comparison)
    if causes:
        (layers, sites), *others = _sites_by_layers(causes)
        more = f" (and {format_count(len(others), 'more place')})" if others else ""
        return f"{verdict}: {word_layers(layers)}, {' and '.join(sites)}{more}"
    # Without blame, as in a chained run that was not recomputed, start at the first site that fails or warns.
    worst = {Verdict.FAIL: SiteStatus.FAIL, Verdict.WARN: SiteStatus.WARN}.get(comparison.verdict)
    for site in comparison.sites:
        if site.status is worst:
            reason = f": {site.reason}" if comparison.verdict is Verdict.WARN and site.reason else ""
            return f"{verdict}: first at {word_place(site.layer, [site.site])}{reason}"
    if comparison.router_dtypes and comparison.verdict is Verdict.WARN:
        part = comparison.router_dtypes[0]
        return f"{verdict}: {part.name} is {part.target}, the golden's {part.reference}"
    if comparison.shows_outputs_only and comparison.verdict is Verdict.PASS:
        return f"{verdict}: outputs only, {comparison.compared} of {format_count(comparison.of, 'site')}"
    if comparison.shows_logits_only and comparison.verdict is Verdict.PASS:
        return f"{verdict}: logits only, {comparison.compared} of {format_count(comparison.of, 'site')}"
    return verdict


def _extent(comparison: Comparison) -> str:
    parts = [f"in {format_count(len(comparison.layers), 'layer')}"] if comparison.layers else []
    if comparison.of_layer(None):
        parts.append("outside them" if parts else "outside the layers")
    where = " and ".join(parts)
    return f"compared {comparison.compared} of {format_count(comparison.of, 'site')} {where}".rstrip()


def _draw_blame(canvas: Canvas, comparison: Comparison) -> None:
    if not comparison.blame:
        return
    canvas.section("To blame")
    causes = causes_of(comparison)
    for cause in causes[:_MOST_BLAMED]:
        first, *others = word_reasons(comparison, cause)
        canvas.paragraph(f"{word_cause(cause)}: {first}")
        for sentence in others:
            canvas.paragraph(sentence, indent=4)
        for site in comparison.of_layer(cause.worst_layer):
            # A site that is wrong in chunks alone has the figures of the other run here.
            if not _is_of_cause(site, cause):
                continue
            if site.noise and math.isfinite(site.noise.token_worst):
                canvas.paragraph(_worst_token(site.site, site.noise), indent=4)
            for sentence in flip_sentences(site):
                canvas.paragraph(sentence, indent=4)
        for sentence in cause.where:
            canvas.paragraph(sentence, indent=4)
    for cause in causes[_MOST_BLAMED:]:
        canvas.paragraph(f"{word_layers(cause.layers)}: {', '.join(word_blamed_sites(cause))}")
    for sentence in _consequences(comparison):
        canvas.paragraph(sentence)


def _is_of_cause(site: SiteResult, cause: BlameGroup) -> bool:
    return site.site in cause.sites and site.status is not SiteStatus.PASS


def _consequences(comparison: Comparison) -> tuple[str, ...]:
    """Return a sentence on the sites that fail behind those to blame; () if there are none."""
    blamed = {(blame.layer, site) for blame in comparison.blame for site in blame.sites}
    layers = {blame.layer for blame in comparison.blame}
    behind = [
        site.site
        for site in comparison.sites
        if site.status is SiteStatus.FAIL and site.layer in layers and (site.layer, site.site) not in blamed
    ]
    if not behind:
        return ()
    sites = ", ".join(word_sites(tuple(dict.fromkeys(behind))))
    return (f"Consequences, which fail behind it: {sites}. --verbose shows their figures.",)


def _sites_by_layers(causes: Sequence[BlameGroup]) -> list[tuple[tuple[int | None, ...], list[str]]]:
    """Return layers with the sites of each cause in them, in the order of the causes."""
    sites_of: dict[tuple[int | None, ...], list[str]] = {}
    for cause in causes:
        sites_of.setdefault(cause.layers, []).append(", ".join(word_blamed_sites(cause)))
    return list(sites_of.items())


def _worst_token(site: str, noise: NoiseRatio) -> str:
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


def _draw_uncompared(canvas: Canvas, comparison: Comparison) -> None:
    for status, words in _UNCOMPARED_WORDS.items():
        missing = [site for site in comparison.sites if site.status is status]
        if not missing:
            continue
        canvas.section(f"{words}: {format_count(len(missing), 'site')}")
        # The title says it already.
        missing = [replace(site, reason="") if site.reason == NOT_EXPOSED else site for site in missing]
        for reason in dict.fromkeys(site.reason for site in missing):
            places = ((site.layer, site.site) for site in missing if site.reason == reason)
            for line in word_sites_by_layer(places):
                canvas.paragraph(f"{line} ({reason})" if reason else line)
        if status is SiteStatus.NOT_EXPOSED and not all(site.reason for site in missing):
            canvas.paragraph(
                "An attribute `sites` of the port's class names their places: see docs/ports.md."
            )


def _draw_next_tokens(canvas: Canvas, comparison: Comparison, *, is_verbose: bool) -> None:
    """Draw the divergence of the logits, the likeliest tokens and the generated ones, if there are any.

    Without `is_verbose`, prompts whose generated tokens are the golden's are counted only.
    """
    results = [site.logits for site in comparison.sites if site.logits is not None]
    if not results and not comparison.generated:
        return
    canvas.section("Next tokens")
    draw_passes(canvas, comparison.pass_logits)
    for logits in results:
        if is_verbose or not logits.is_of_head or logits.num_disagreeing:
            for sentence in _logits_sentences(logits):
                canvas.paragraph(sentence)
    alike = [row for row in comparison.generated if row.reference is None and not row.reason]
    for row in comparison.generated:
        if is_verbose or row not in alike:
            canvas.paragraph(_word_row(row))
    if alike and not is_verbose:
        tokens = format_count(sum(row.num_compared for row in alike), "generated token")
        canvas.paragraph(f"{format_count(len(alike), 'prompt')}: all {tokens} are the golden's")


def _word_row(row: GeneratedRow) -> str:
    """Return how far a prompt's generated tokens are the golden's, and the first that differs, if any."""
    alike = f"prompt {row.row}: {row.num_alike} of {row.num_compared} generated tokens are the golden's"
    if row.reference is None:
        return f"{alike} ({row.reason})" if row.reason else alike
    judged = {SiteStatus.PASS: "explained by noise", SiteStatus.FAIL: "not explained by noise"}
    return (
        f"{alike}; the next is {row.target}, the golden's is {row.reference}: "
        f"{judged.get(row.status, str(row.status))} ({row.reason})"
    )


def _logits_sentences(logits: LogitsResult) -> list[str]:
    row, position = logits.worst_token
    overlaps = ", ".join(f"{100 * share:.1f} % of the top {k}" for k, share in logits.overlaps.items())
    of = "the head on the port's own last layer: " if logits.is_of_head else ""
    sentences = [
        f"{of}KL divergence in nats: mean {word_figure(logits.kl_mean)}, 95th percentile {word_figure(logits.kl_p95)}"
        f"; noise comes to {word_figure(logits.kl_mean_foreseen)} and {word_figure(logits.kl_p95_foreseen)}"
        f"; worst {word_figure(logits.kl_worst)} at row {row}, token {position}",
        f"of the golden's likeliest tokens the port has {overlaps}",
    ]
    if logits.num_disagreeing:
        sentences.append(
            f"{logits.num_disagreeing} of {logits.num_tokens} places have another likeliest token, "
            f"{logits.num_explained} of them within the noise"
        )
    return sentences + [
        f"row {choice.row}, token {choice.position}: {choice.target} for {choice.reference}, "
        f"{word_figure(choice.margin)} below it, noise reaches {word_figure(choice.reach)}"
        for choice in logits.worst_choices[:_MOST_NAMED]
    ]
