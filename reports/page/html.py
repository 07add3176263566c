r"""Html: the page as one file, which needs no network and lets no script run but its own.

Text of captures goes through jinja2's escaping, and through JSON whose `<`, `>` and `&` are written as `\u003c`. The
page's policy names its scripts by their digests and allows no connection, so that nothing else could run or load.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from minimax_tools.errors import MissingExtraError
from minimax_tools.printable import printable, printable_values
from reports.data import to_json
from reports.page.charts import draw_charts
from reports.page.evidence import Report
from reports.page.glossary import GLOSSARY, SITE_MEANINGS, explain_place, explain_sentence
from reports.page.heat_map import FIGURES, Cell, cells_of, draw_layers, draw_outside
from reports.views import (
    anchor_of,
    blame_rows,
    group_uncompared,
    headline,
    name_sides,
    token_tables,
    word_extent,
)
from reports.wording import word_figure, word_place, word_untested

_ASSETS = Path(__file__).with_name("assets")
_LIBRARY = "vl_convert"
# Newest version of Vega-Lite that every vl-convert from 1.9 on can bundle.
_VEGA_LITE = "6.1"


def has_library() -> bool:
    """Decide whether the package that draws the page's charts is installed."""
    return importlib.util.find_spec(_LIBRARY) is not None


def render_page(report: Report) -> str:
    """Return the page of a report as HTML.

    Raises:
        MissingExtraError: The package that draws the charts is not installed.
    """
    library, script = _chart_library(), _read("page.js")
    comparison, logits = report.comparison, report.evidence.logits
    layers, outside = draw_layers(comparison), draw_outside(comparison)
    charts = draw_charts(comparison, report.evidence)
    specs = {chart.name: to_json(chart.spec) for section in charts.values() for chart in section}
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            sentence=headline(comparison),
            extent=word_extent(comparison),
            untested=word_untested(comparison.untested),
            sides=name_sides(comparison),
            blame=list(blame_rows(comparison)),
            figures=FIGURES,
            layers=layers,
            outside=outside,
            cells=printable_values([_details(cell) for cell in (*cells_of(layers), *cells_of(outside))]),
            charts=charts,
            specs=printable_values(specs),
            tables=list(token_tables(comparison)),
            top_tokens=() if logits is None else logits.top,
            uncompared=group_uncompared(comparison),
            notes=(*comparison.notes, *report.evidence.notes),
            glossary=GLOSSARY,
            site_meanings=dict(SITE_MEANINGS),
            policy=_policy(library, script),
            library=Markup(library),  # a package's code, and no text of a capture
            script=Markup(script),
            style=Markup(_read("page.css")),
        )
    )


def _details(cell: Cell) -> dict[str, Any]:
    """Return what the page's script shows of a cell."""
    record: dict[str, Any] = to_json(cell)
    return {**record, "place": cell.place, "anchor": cell.anchor}


@lru_cache(maxsize=1)
def _chart_library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; bundling takes seconds, so it is done once."""
    if not has_library():
        raise MissingExtraError("vl-convert-python", extra="report", needed_for="report.html")
    import vl_convert

    return _closed(vl_convert.javascript_bundle(vl_version=_VEGA_LITE))


def _closed(script: str) -> str:
    """Return a script that the end of no element interrupts, and whose line ends a browser leaves alone."""
    return (
        script.replace("\r\n", "\n")
        .replace("\r", "\n")
        .replace("</script", "<\\/script")
        .replace("<!--", "<\\!--")
    )


def _policy(*scripts: str) -> str:
    """Return the content security policy that lets these scripts run, and nothing be loaded."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:"


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(anchor_of=anchor_of, word_place=word_place)
    environment.filters["figure"] = word_figure
    environment.filters["place"] = explain_place
    environment.filters["sentence"] = explain_sentence
    return environment


def _finalize(value: Any) -> Any:
    """Return what the template shows of a value; code of the page's own (Markup) stays."""
    return printable(value) if type(value) is str else value


def _read(name: str) -> str:
    return _ASSETS.joinpath(name).read_text(encoding="utf-8")
