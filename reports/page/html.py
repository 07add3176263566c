r"""Html: the page as one file, which needs no network and lets no script run but its own.

Text of captures goes through jinja2's escaping, and through JSON whose `<`, `>` and `&` are written as `\u003c`. The
page's policy names its scripts by their digests and allows no connection, so that nothing else could run or load.
`assets/charts.json.j2` has the charts' specifications for Vega-Lite; `assets/sites.md` is the page docs/sites.md, whose
words and sites are explained where they stand.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from markupsafe import Markup, escape

from minimax_tools.errors import MissingExtraError
from minimax_tools.machine.json_file import parse_json
from minimax_tools.printable import printable, printable_values
from minimax_tools.results.results import Comparison, Curve
from reports.data import to_json
from reports.page.evidence import ErrorPicture, Evidence, LayerRouting, LogitsEvidence, Report, SiteErrors
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

_DIGITS = 4
# Flips that the chart of margins shows.
_MOST_FLIPS = 800
_MOST_MASSIVE = 8
_KINDS = ("explained by noise", "not explained")


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


_PAGE = _ASSETS.joinpath("sites.md").read_text(encoding="utf-8")


def _read_rows(row: str) -> Mapping[str, str]:
    """Return words and meanings, without their marks, of the page's rows with this pattern."""
    rows = re.findall(rf"^\| {row} \|$", _PAGE, re.MULTILINE)
    return MappingProxyType({word: re.sub("[*`]", "", meaning) for word, meaning in rows})


GLOSSARY = _read_rows(r"\*\*(.+?)\*\* \| (.+)")
# Between a site and its meaning stands its shape, behind that the places where it is found.
SITE_MEANINGS = _read_rows(r"`(\w+)` \| \[[^|]+\] \| ([^|]+) \| [^|]+")
# A name before a dot is a weight's, such as `q_proj.weight`.
_NAMES = re.compile(rf"(?<![\w.])({'|'.join(SITE_MEANINGS)})(?!\w|\.\w)")


def explain_place(text: str) -> Markup:
    """Return a place as HTML, each site in it with its meaning."""
    return Markup("").join(
        _explain(part) if part in SITE_MEANINGS else escape(part) for part in _NAMES.split(text)
    )


def explain_sentence(text: str) -> Markup:
    """Return a sentence as HTML, each site with its meaning; `output` and the like may be plain words there."""
    return Markup("").join(
        _explain(part) if "_" in part and part in SITE_MEANINGS else escape(part)
        for part in _NAMES.split(text)
    )


def _explain(site: str) -> Markup:
    tip = f"{site}: {SITE_MEANINGS[site]}"
    return Markup('<abbr class="site-name" data-tip="{}">{}</abbr>').format(tip, site)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart: its id in the page, its title, a sentence on how to read it, and its specification."""

    name: str
    title: str
    reading: str
    spec: Mapping[str, Any]


@functools.cache
def _specifications() -> Any:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS), autoescape=False, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("charts.json.j2").module


def _specify(kind: str, **values: Any) -> dict[str, Any]:
    """Return the specification of a kind of chart: a macro of the template, with its values."""
    spec: dict[str, Any] = parse_json(getattr(_specifications(), kind)(**values))
    return spec


def draw_charts(comparison: Comparison, evidence: Evidence) -> dict[str, tuple[Chart, ...]]:
    """Return the charts of each section of the page by its id; of a site's errors, `errors-` and its anchor."""
    blamed = (blame.layer for blame in comparison.blame if blame.layer is not None)
    anchors = {anchor_of(errors.layer, errors.site): errors for errors in evidence.sites}
    return {
        "curves": (*_draw_curves(comparison), *_draw_chain(comparison.curve)),
        **{
            f"errors-{anchor}": tuple(_draw_site(errors, anchor=anchor)) for anchor, errors in anchors.items()
        },
        "routing": (
            *_draw_flips(comparison),
            *_draw_loads(evidence.routing, chosen=next(blamed, None)),
            *_draw_margins(evidence.routing),
        ),
        "logits": tuple(_draw_divergence(evidence.logits)),
    }


def _draw_curves(comparison: Comparison) -> Iterator[Chart]:
    """Draw the error of a site over the layers, with the noise floor as a band; the reader chooses the site."""
    rows = [
        {
            "layer": site.layer,
            "site": site.site,
            "error": _short(site.noise.whole * site.noise.floor),
            "floor": _short(site.noise.floor),
            "rho": _short(site.noise.whole),
            "status": str(site.status),
        }
        for site in comparison.sites
        if site.layer is not None
        and site.noise is not None
        and site.noise.floor
        and 0.0 < site.noise.whole * site.noise.floor < math.inf
    ]
    if not rows:
        return
    own = (
        " Each layer of the chain is judged on the port's own input." if _is_on_own_input(comparison) else ""
    )
    sites = list(dict.fromkeys(str(row["site"]) for row in rows))
    blamed = [site for blame in comparison.blame if blame.layer is not None for site in blame.sites]
    chosen = next((site for site in blamed if site in sites), "output" if "output" in sites else sites[0])
    yield Chart(
        name="curve",
        title="Error over the layers",
        reading="The port's error at one site, relative to the golden's values. The band is the noise floor: what "
        f"BF16 alone costs there.{own}",
        spec=_specify("curve", rows=rows, sites=sites, chosen=chosen),
    )


def _is_on_own_input(comparison: Comparison) -> bool:
    """Decide whether the layers of a chained run were judged without the errors that they inherit."""
    incoming = [site.noise.incoming for site in comparison.sites if site.layer is not None and site.noise]
    return comparison.curve is not None and not any(incoming)


def _draw_chain(curve: Curve | None) -> Iterator[Chart]:
    """Draw the error along a chained run; nothing for an isolated run."""
    if curve is None:
        return
    rows = [
        {
            "layer": point.layer,
            "error": _positive(point.error),
            "inherited": _positive(point.handed_on),
            "floor": _positive(point.floor),
            "rho": _short(point.ratio),
            "status": "onset" if point.layer == curve.onset else "",
        }
        for point in curve.points
    ]
    onset = "No layer adds more than noise to what it inherits."
    if curve.onset is not None:
        onset = f"Errors beyond noise begin at layer {curve.onset}."
    yield Chart(
        name="chain",
        title="Error along the chain",
        reading="Error of each layer's output against the golden's (line), of its input (dashed), and the noise "
        f"floor (band). {onset}",
        spec=_specify("chain", rows=rows, onset=curve.onset),
    )


def _draw_flips(comparison: Comparison) -> Iterator[Chart]:
    """Draw the flips of every layer, those that noise explains apart; nothing if no experts were compared."""
    routings = [(site.layer, site.routing) for site in comparison.sites if site.routing is not None]
    rows = [
        {"layer": layer, "kind": kind, "tokens": count, "of": routing.num_tokens}
        for layer, routing in routings
        for kind, count in zip(_KINDS, (routing.num_explained, routing.num_unexplained), strict=True)
    ]
    if rows:
        total = sum(routing.num_flipped for _, routing in routings)
        yield Chart(
            name="flips",
            title="Tokens with other experts",
            reading=f"Flips by layer, {total} in all. Those that noise explains are no fault.",
            spec=_specify("flips", rows=rows, kinds=_KINDS),
        )


def _draw_loads(routing: Sequence[LayerRouting], *, chosen: int | None) -> Iterator[Chart]:
    """Draw how many tokens each expert gets on both sides, in a layer that the reader chooses."""
    if not routing:
        return
    layers = [layer.layer for layer in routing]
    rows = [{"layer": layer.layer, "golden": layer.golden_load, "port": layer.port_load} for layer in routing]
    first = chosen if chosen in layers else max(routing, key=lambda layer: len(layer.flips)).layer
    yield Chart(
        name="loads",
        title="Load of the experts",
        reading="Tokens that each expert gets: bars are the golden's, points the port's.",
        spec=_specify("loads", rows=rows, layers=layers, chosen=first),
    )


def _draw_margins(routing: Sequence[LayerRouting]) -> Iterator[Chart]:
    """Draw the margin of every flip in units of what noise may turn round; nothing without flips or a floor."""
    rows = [
        {
            "layer": layer.layer,
            "token": f"row {flip.row}, token {flip.position}",
            "margin": _short(flip.margin),
            "reach": _short(max(flip.margin, 1e-12) / layer.reach),
            "kind": _KINDS[0] if flip.is_explained else _KINDS[1],
        }
        for layer in routing
        if layer.reach
        for flip in layer.flips
    ][:_MOST_FLIPS]
    if not rows:
        return
    chained = " Layers of a chain are held against the golden itself, errors that they inherit included."
    yield Chart(
        name="margins",
        title="Margins of the flips",
        reading="Distance of the scores that changed places, in units of the largest that noise may turn round. "
        "Above the dashed line noise does not explain the flip."
        f"{chained if any(layer.is_inherited for layer in routing) else ''}",
        spec=_specify("margins", rows=rows, kinds=_KINDS),
    )


def _draw_divergence(logits: LogitsEvidence | None) -> Iterator[Chart]:
    """Draw the divergence of the next-token distributions by position, with what noise foretells."""
    if logits is None:
        return
    rows = [
        {"row": f"row {row}", "position": position, "kl": _positive(kl), "foreseen": _positive(foreseen)}
        for row, position, kl, foreseen in zip(
            logits.rows, logits.positions, logits.divergence, logits.foreseen, strict=True
        )
    ]
    yield Chart(
        name="divergence",
        title="KL divergence by position",
        reading="KL(golden ‖ port) in nats of the next token after each position (points), and what noise "
        "foretells (line). The errors of all layers are in it.",
        spec=_specify("divergence", rows=rows, prompts=list(dict.fromkeys(str(row["row"]) for row in rows))),
    )


def _draw_site(errors: SiteErrors, *, anchor: str) -> Iterator[Chart]:
    """Draw the errors of one site: their sizes, and where they lie."""
    picture, unit = errors.picture, errors.picture.unit
    yield Chart(
        name=f"sizes-{anchor}",
        title=f"Sizes of the errors against {'the float32 twin' if errors.has_twin else 'the golden'}",
        reading=_read_histogram(errors),
        spec=_specify("sizes", rows=list(_size_rows(errors))),
    )
    yield Chart(
        name=f"picture-{anchor}",
        title="Error by token and channel",
        reading=f"Root mean square of each block of tokens and channels, in units of {unit}; faint is 1 and below.",
        spec=_picture(picture),
    )
    yield Chart(
        name=f"tokens-{anchor}",
        title="Error by token",
        reading=f"In units of {unit}, over all channels.",
        spec=_profile(picture.token_starts, picture.by_token, title="token", names=picture.token_names),
    )
    massive = ", ".join(map(str, picture.massive[:_MOST_MASSIVE]))
    yield Chart(
        name=f"channels-{anchor}",
        title="Error by channel",
        reading=f"In units of {unit}, over all tokens.{massive and f' Massive channels: {massive}.'}",
        spec=_profile(picture.channel_starts, picture.by_channel, title="channel"),
    )


def _size_rows(errors: SiteErrors) -> Iterator[dict[str, Any]]:
    histogram = errors.histogram
    for side, counts in (("port", histogram.port), ("golden", histogram.golden)):
        # Without a twin the golden has no counts.
        for low, high, count in zip(histogram.edges, histogram.edges[1:], counts, strict=False):
            yield {"side": side, "low": _short(low), "high": _short(high), "elements": count}


def _picture(picture: ErrorPicture) -> dict[str, Any]:
    # NaN and infinity are drawn as the largest error.
    most = max((value for blocks in picture.blocks for value in blocks if math.isfinite(value)), default=1.0)
    rows = [
        {
            "token": start,
            "end": end,
            "tokens": name,
            "error": [_short(value if value <= most else most) for value in blocks],
        }
        for start, end, name, blocks in zip(
            picture.token_starts, picture.token_starts[1:], picture.token_names, picture.blocks, strict=False
        )
    ]
    return _specify(
        "picture", rows=rows, starts=list(picture.channel_starts), most=max(most, 2.0), unit=picture.unit
    )


def _profile(
    starts: Sequence[int], values: Sequence[float], *, title: str, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the error over blocks of tokens or channels as a stepped line, with a rule at 1."""
    rows: list[dict[str, Any]] = [
        {
            "start": start,
            "name": names[place] if names else f"{start} to {starts[place + 1] - 1}",
            "error": _positive(value),
        }
        for place, (start, value) in enumerate(zip(starts, values, strict=False))
    ]
    if rows:
        rows.append({**rows[-1], "start": starts[-1]})
    return _specify("profile", rows=rows, title=title)


def _read_histogram(errors: SiteErrors) -> str:
    histogram = errors.histogram
    equal = f"{histogram.num_equal} elements of the port have no error"
    if not errors.has_twin:
        return f"The golden keeps no float32 twin of the site. {equal}."
    return (
        "Line: the port. Bars: the golden, which is noise alone. "
        f"{equal}, {histogram.num_equal_golden} of the golden."
    )


def _positive(value: float | None) -> float | None:
    """Return a value that a logarithmic axis can show; None for others."""
    return _short(value) if value is not None and 0.0 < value < math.inf else None


def _short(value: float) -> float | None:
    """Round to four digits, which keeps the file small; None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
