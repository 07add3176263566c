"""Charts of all layers: the error of a site over the layers, and along a chain.

Vega: parts of the charts' specifications for Vega-Lite, which draws them in the reader's browser.

Colours are variables of the style sheet, so that a chart follows dark mode and print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minimax_tools.results.results import Comparison, Curve

INK, FAINT, GRID = "var(--ink)", "var(--faint)", "var(--line)"
PORT, GOLDEN, BAND = "var(--port)", "var(--golden)", "var(--band)"
HEIGHT = 220
# Ticks of logarithmic axes; those outside the data are not drawn.
DECADES = tuple(float(f"1e{power}") for power in range(-15, 9))

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_DIGITS = 4

Spec = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart: its id in the page, its title, a sentence on how to read it, and its specification."""

    name: str
    title: str
    reading: str
    spec: Spec


def chart_spec(body: Spec) -> dict[str, Any]:
    """Return a whole specification: as wide as its place in the page, with the page's colours."""
    return {"$schema": _SCHEMA, "width": "container", "config": _CONFIG, **body}


def layer_axis() -> dict[str, Any]:
    """Return an axis of layers, which need not begin at 0."""
    return {
        "field": "layer",
        "type": "quantitative",
        "title": "layer",
        "axis": {"tickMinStep": 1},
        "scale": {"zero": False, "nice": False, "padding": 8},
    }


def log_axis(name: str, title: str) -> dict[str, Any]:
    """Return a logarithmic axis of a field, with ticks at powers of ten."""
    return {
        "field": name,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log", "nice": True},
        "axis": {"values": DECADES, "format": "~g", "labelOverlap": True},
    }


def quantity(name: str, title: str) -> dict[str, Any]:
    """Return a linear axis of a field."""
    return {"field": name, "type": "quantitative", "title": title}


def shown_field(name: str, title: str, kind: str = "quantitative") -> dict[str, Any]:
    """Return a field as a tooltip shows it."""
    field: dict[str, Any] = {"field": name, "type": kind, "title": title}
    return {**field, "format": ".4~g"} if kind == "quantitative" else field


def two_marks(name: str, words: Iterable[str], marks: Iterable[str]) -> dict[str, Any]:
    """Return a channel, colour or shape, that tells two words of a field apart, with its legend."""
    return {
        "field": name,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(words), "range": list(marks)},
        "legend": {"orient": "top"},
    }


def positive(value: float | None) -> float | None:
    """Return a value that a logarithmic axis can show; None for others."""
    return short(value) if value is not None and 0.0 < value < math.inf else None


def short(value: float) -> float | None:
    """Round to four digits, which keeps the file small; None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


_AXIS = {
    "labelColor": INK,
    "titleColor": INK,
    "domainColor": FAINT,
    "tickColor": FAINT,
    "gridColor": GRID,
    "titleFontWeight": "normal",
    "labelFontSize": 11,
    "titleFontSize": 12,
}
_CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": _AXIS,
    "legend": {"labelColor": INK, "titleColor": INK, "titleFontWeight": "normal"},
    "rule": {"color": INK},
}


def draw_curves(comparison: Comparison) -> tuple[Chart, ...]:
    """Draw the error of a site over the layers, with the noise floor as a band; the reader chooses the site."""
    rows = [
        {
            "layer": site.layer,
            "site": site.site,
            "error": short(site.noise.whole * site.noise.floor),
            "floor": short(site.noise.floor),
            "rho": short(site.noise.whole),
            "status": str(site.status),
        }
        for site in comparison.sites
        if site.layer is not None
        and site.noise is not None
        and site.noise.floor
        and 0.0 < site.noise.whole * site.noise.floor < math.inf
    ]
    if not rows:
        return ()
    own = (
        " Each layer of the chain is judged on the port's own input." if _is_on_own_input(comparison) else ""
    )
    sites = list(dict.fromkeys(str(row["site"]) for row in rows))
    blamed = [site for blame in comparison.blame if blame.layer is not None for site in blame.sites]
    chosen = next((site for site in blamed if site in sites), "output" if "output" in sites else sites[0])
    spec = _over_layers(
        rows,
        error="the port's error",
        extra=[shown_field("rho", "ρ"), shown_field("status", "status", "nominal")],
    )
    return (
        Chart(
            name="curve",
            title="Error over the layers",
            reading="The port's error at one site, relative to the golden's values. The band is the noise floor: what "
            f"BF16 alone costs there.{own}",
            spec={
                **spec,
                "params": [
                    {
                        "name": "site",
                        "value": chosen,
                        "bind": {"input": "select", "options": sites, "name": "site "},
                    }
                ],
                "transform": [{"filter": "datum.site == site"}],
            },
        ),
    )


def _is_on_own_input(comparison: Comparison) -> bool:
    """Decide whether the layers of a chained run were judged without the errors that they inherit."""
    incoming = [site.noise.incoming for site in comparison.sites if site.layer is not None and site.noise]
    return comparison.curve is not None and not any(incoming)


def draw_chain(curve: Curve | None) -> tuple[Chart, ...]:
    """Draw the error along a chained run; nothing for an isolated run."""
    if curve is None:
        return ()
    rows = [
        {
            "layer": point.layer,
            "error": positive(point.error),
            "inherited": positive(point.handed_on),
            "floor": positive(point.floor),
            "rho": short(point.ratio),
            "status": "onset" if point.layer == curve.onset else "",
        }
        for point in curve.points
    ]
    spec = _over_layers(
        rows,
        error="error of the output",
        extra=[shown_field("inherited", "inherited"), shown_field("rho", "ρ")],
    )
    inherited = {
        "mark": {"type": "line", "color": FAINT, "strokeDash": [4, 3]},
        "encoding": {"y": {"field": "inherited", "type": "quantitative"}},
    }
    onset = "No layer adds more than noise to what it inherits."
    if curve.onset is not None:
        onset = f"Errors beyond noise begin at layer {curve.onset}."
        mark = {"type": "rule", "color": PORT, "strokeDash": [2, 2]}
        rule = {"data": {"values": [{"layer": curve.onset}]}, "mark": mark}
        spec = {**spec, "layer": [*spec["layer"], rule]}
    return (
        Chart(
            name="chain",
            title="Error along the chain",
            reading="Error of each layer's output against the golden's (line), of its input (dashed), and the noise "
            f"floor (band). {onset}",
            spec={**spec, "layer": [spec["layer"][0], inherited, *spec["layer"][1:]]},
        ),
    )


def _over_layers(rows: Sequence[Mapping[str, Any]], *, error: str, extra: list[Spec]) -> dict[str, Any]:
    """Return a chart of errors over layers: a band up to the floor, and the error as a line with points."""
    tooltip = [
        shown_field("layer", "layer"),
        shown_field("error", error),
        shown_field("floor", "noise floor"),
        *extra,
    ]
    shape = {
        "field": "status",
        "type": "nominal",
        "scale": {
            "domain": ["pass", "warn", "fail", "onset", ""],
            "range": ["circle", "triangle-up", "cross", "cross", "circle"],
        },
        "legend": None,
    }
    return chart_spec(
        {
            "data": {"values": list(rows)},
            "height": HEIGHT,
            "encoding": {"x": layer_axis(), "tooltip": tooltip},
            "layer": [
                {
                    "mark": {"type": "area", "color": BAND, "line": {"color": GOLDEN, "strokeWidth": 1}},
                    "encoding": {
                        "y": {**log_axis("floor", "relative error"), "stack": None},
                        "y2": {"value": "height"},
                    },
                },
                {
                    "mark": {"type": "line", "color": PORT, "strokeWidth": 2},
                    "encoding": {"y": log_axis("error", "relative error")},
                },
                {
                    "mark": {"type": "point", "color": PORT, "filled": True, "size": 44},
                    "encoding": {"y": log_axis("error", "relative error"), "shape": shape},
                },
            ],
        }
    )
