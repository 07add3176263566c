"""Vega: parts of the charts' specifications for Vega-Lite, which draws them in the reader's browser.

Colours are variables of the style sheet, so that a chart follows dark mode and print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
