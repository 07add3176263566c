"""Page: the content of a report page, planned from a comparison before anything is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from minimax_tools.capture.passes import pass_name
from minimax_tools.errors import format_count
from minimax_tools.results.results import Comparison, GeneratedRow
from reports.page.charts import Chart, draw_chain, draw_curves
from reports.page.choice_charts import draw_divergence, draw_flips, draw_loads, draw_margins
from reports.page.evidence import (
    DiagnosedRun,
    Evidence,
    SiteErrors,
    TopTokens,
    UncomparedGroup,
    group_uncompared,
)
from reports.page.glossary import GLOSSARY
from reports.page.heat_map import FIGURES, Cell, Figure, HeatMap, draw_layers, draw_outside
from reports.page.origins import OriginRow
from reports.page.site_charts import draw_site
from reports.terminal import render_comparison
from reports.wording import (
    causes_of,
    word_cause,
    word_figure,
    word_layer,
    word_port,
    word_reasons,
    word_untested,
)

# Wide enough that a line of the terminal's text is not broken.
_ONE_LINE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameRow:
    """A cause: layers in which the same sites are to blame."""

    place: str
    reason: str
    of_sites: tuple[str, ...] = ()  # of a cause with several sites, a sentence on each
    where: tuple[str, ...]
    anchors: tuple[str, ...]  # cells of the worst layer, as `Cell.anchor`


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSection:
    """Errors of one site, with their charts."""

    errors: SiteErrors
    title: str
    anchor: str  # as `Cell.anchor`
    charts: tuple[Chart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTable:
    """A table of a few rows, as words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The whole page."""

    verdict: str
    sentence: str  # the verdict, with the place to look at first
    extent: str  # number of sites that were compared
    untested: str  # what was not tested, in a sentence; empty if nothing was left out
    sides: tuple[tuple[str, str], ...]  # golden, run, criteria and tokens
    next_commands: tuple[str, ...]
    blame: tuple[BlameRow, ...]
    figures: tuple[Figure, ...]
    layers: HeatMap
    outside: HeatMap
    curves: tuple[Chart, ...]
    sites: tuple[SiteSection, ...]
    routing: tuple[Chart, ...]
    logits: tuple[Chart, ...]
    top_tokens: tuple[TopTokens, ...]
    tables: tuple[SmallTable, ...]  # of the tokens that both sides chose
    diagnosis: DiagnosedRun | None  # None if none was made
    origins: tuple[OriginRow, ...]
    uncompared: tuple[UncomparedGroup, ...]
    notes: tuple[str, ...]
    glossary: Mapping[str, str]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells, in the order in which the page numbers them."""
        rows = (*self.layers.rows, *self.outside.rows)
        return tuple(cell for row in rows for cell in row.cells if cell is not None)

    @property
    def charts(self) -> tuple[Chart, ...]:
        """The charts of the page."""
        of_sites = (chart for section in self.sites for chart in section.charts)
        return (*self.curves, *of_sites, *self.routing, *self.logits)


def plan_page(
    comparison: Comparison,
    *,
    next_commands: tuple[str, ...],
    evidence: Evidence,
    diagnosis: DiagnosedRun | None,
    origins: tuple[OriginRow, ...],
) -> Page:
    """Plan the page of a comparison."""
    sentence = render_comparison(comparison, width=_ONE_LINE, is_terminal=False).partition("\n")[0]
    layers, outside = draw_layers(comparison), draw_outside(comparison)
    logits = evidence.logits
    return Page(
        verdict=str(comparison.verdict),
        sentence=sentence,
        extent=_word_extent(comparison),
        untested=word_untested(comparison.untested),
        sides=tuple(_sides(comparison)),
        next_commands=next_commands,
        blame=tuple(_blame_rows(comparison)),
        figures=FIGURES,
        layers=layers,
        outside=outside,
        curves=(*draw_curves(comparison), *draw_chain(comparison.curve)),
        sites=tuple(_section(errors) for errors in evidence.sites),
        routing=(
            *draw_flips(comparison),
            *draw_loads(evidence.routing, chosen=_first_layer(comparison)),
            *draw_margins(evidence.routing),
        ),
        logits=() if logits is None else draw_divergence(logits),
        top_tokens=() if logits is None else logits.top,
        tables=tuple(_token_tables(comparison)),
        diagnosis=diagnosis,
        origins=origins,
        uncompared=group_uncompared(comparison),
        notes=(*comparison.notes, *evidence.notes),
        glossary=GLOSSARY,
    )


def _word_extent(comparison: Comparison) -> str:
    layers = f" in {format_count(len(comparison.layers), 'layer')}" if comparison.layers else ""
    return f"compared {comparison.compared} of {format_count(comparison.of, 'site')}{layers}"


def _sides(comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield "golden", comparison.reference
    yield "run", comparison.target
    if comparison.port:
        yield "port", word_port(comparison.port)
    yield "criteria", comparison.criteria
    if comparison.tokens:
        yield "tokens", comparison.tokens


def _blame_rows(comparison: Comparison) -> Iterator[BlameRow]:
    for finding in comparison.findings:
        if not finding.is_of_sites:
            mistake = "" if finding.mistake is None else f"matches {finding.mistake}: {finding.what}"
            yield BlameRow(
                place=", ".join((word_layer(finding.layer), *finding.sites)),
                reason=finding.reason,
                where=tuple(filter(None, (mistake,))),
                anchors=(),
            )
    for cause in causes_of(comparison):
        first, *others = word_reasons(comparison, cause)
        yield BlameRow(
            place=word_cause(cause),
            reason=first,
            of_sites=tuple(others),
            where=cause.where,
            anchors=_anchors(comparison, cause.worst_layer, cause.sites),
        )


def _anchors(comparison: Comparison, layer: int | None, sites: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cells of the sites that were compared: a blame names the others as suspects."""
    compared = {result.site for result in comparison.of_layer(layer) if result.status.is_compared}
    return tuple(f"{'model' if layer is None else layer}-{site}" for site in sites if site in compared)


def _first_layer(comparison: Comparison) -> int | None:
    """Return the first layer that is to blame, in which charts of single layers begin."""
    return next((blame.layer for blame in comparison.blame if blame.layer is not None), None)


def _section(errors: SiteErrors) -> SiteSection:
    name = "model" if errors.layer is None else errors.layer
    anchor = f"{name}-{errors.site}"
    return SiteSection(
        errors=errors,
        title=f"{word_layer(errors.layer)}, {errors.site}",
        anchor=anchor,
        charts=draw_site(errors, anchor=anchor),
    )


def _token_tables(comparison: Comparison) -> Iterator[SmallTable]:
    if comparison.pass_logits:
        yield SmallTable(
            title="Next tokens, the errors of all layers included",
            columns=("pass", "tokens", "same likeliest", "KL mean", "KL worst", "worst at"),
            rows=tuple(
                (
                    "all" if one.number is None else pass_name(one.number),
                    str(one.num_tokens),
                    str(one.num_agreeing),
                    word_figure(one.kl_mean),
                    word_figure(one.kl_worst),
                    f"row {one.worst_token[0]}, token {one.worst_token[1]}",
                )
                for one in comparison.pass_logits
            ),
        )
    if comparison.generated:
        yield SmallTable(
            title="Generated tokens",
            columns=("prompt", "the golden's", "status", "first difference"),
            rows=tuple(
                (str(row.row), f"{row.num_alike} of {row.num_compared}", str(row.status), _difference(row))
                for row in comparison.generated
            ),
        )
    for result in comparison.sites:
        if result.logits is not None:
            logits = result.logits
            of_head = " of the head on the port's own last layer" if logits.is_of_head else ""
            overlaps = tuple(
                (f"of the golden's {k} likeliest the port has", f"{100 * share:.1f} %")
                for k, share in logits.overlaps.items()
            )
            kl = (
                f"{word_figure(logits.kl_mean)}, {word_figure(logits.kl_p95)}, {word_figure(logits.kl_worst)}"
            )
            foreseen = f"{word_figure(logits.kl_mean_foreseen)}, {word_figure(logits.kl_p95_foreseen)}"
            yield SmallTable(
                title=f"Next-token distributions{of_head}, as judged",
                columns=("figure", "value"),
                rows=(
                    ("KL(golden ‖ port) in nats: mean, p95, worst", kl),
                    ("the same as noise foretells: mean, p95", foreseen),
                    (
                        "tokens with another likeliest next token",
                        f"{logits.num_disagreeing} of {logits.num_tokens}",
                    ),
                    ("explained by noise", str(logits.num_explained)),
                    *overlaps,
                ),
            )


def _difference(row: GeneratedRow) -> str:
    if row.reference is None:
        return row.reason
    words = f"{row.target} for {row.reference}"
    return f"{words} ({row.reason})" if row.reason else words
