"""Page: the content of a report page, planned from a comparison before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minimax_tools.results.results import Comparison
from reports.page.charts import (
    Chart,
    draw_chain,
    draw_curves,
    draw_divergence,
    draw_flips,
    draw_loads,
    draw_margins,
    draw_site,
)
from reports.page.evidence import DiagnosedRun, Evidence, SiteErrors, TopTokens
from reports.page.glossary import GLOSSARY
from reports.page.heat_map import FIGURES, Cell, Figure, HeatMap, draw_layers, draw_outside
from reports.page.origins import OriginRow
from reports.views import (
    BlameRow,
    SmallTable,
    UncomparedGroup,
    anchor_of,
    blame_rows,
    group_uncompared,
    headline,
    name_sides,
    token_tables,
    word_extent,
)
from reports.wording import word_place, word_untested


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSection:
    """Errors of one site, with their charts."""

    errors: SiteErrors
    title: str
    anchor: str  # as `Cell.anchor`
    charts: tuple[Chart, ...]


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
    logits = evidence.logits
    return Page(
        verdict=str(comparison.verdict),
        sentence=headline(comparison),
        extent=word_extent(comparison),
        untested=word_untested(comparison.untested),
        sides=tuple(name_sides(comparison)),
        next_commands=next_commands,
        blame=tuple(blame_rows(comparison)),
        figures=FIGURES,
        layers=draw_layers(comparison),
        outside=draw_outside(comparison),
        curves=(*draw_curves(comparison), *draw_chain(comparison.curve)),
        sites=tuple(_section(errors) for errors in evidence.sites),
        routing=(
            *draw_flips(comparison),
            *draw_loads(evidence.routing, chosen=_first_layer(comparison)),
            *draw_margins(evidence.routing),
        ),
        logits=tuple(draw_divergence(logits)),
        top_tokens=() if logits is None else logits.top,
        tables=tuple(token_tables(comparison)),
        diagnosis=diagnosis,
        origins=origins,
        uncompared=group_uncompared(comparison),
        notes=(*comparison.notes, *evidence.notes),
        glossary=GLOSSARY,
    )


def _first_layer(comparison: Comparison) -> int | None:
    """Return the first layer that is to blame, in which charts of single layers begin."""
    return next((blame.layer for blame in comparison.blame if blame.layer is not None), None)


def _section(errors: SiteErrors) -> SiteSection:
    anchor = anchor_of(errors.layer, errors.site)
    return SiteSection(
        errors=errors,
        title=word_place(errors.layer, [errors.site]),
        anchor=anchor,
        charts=tuple(draw_site(errors, anchor=anchor)),
    )
