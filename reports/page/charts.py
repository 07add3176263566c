"""Charts: specifications for Vega-Lite, which draws them in the reader's browser.

Colours are variables of the style sheet, so that a chart follows dark mode and print. No chart tells by hue alone what
it has to tell: the sides differ by the kind of their mark too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minimax_tools.results.results import Comparison, Curve
from reports.page.evidence import ErrorPicture, LayerRouting, LogitsEvidence, SiteErrors

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_INK, _FAINT, _GRID = "var(--ink)", "var(--faint)", "var(--line)"
_PORT, _GOLDEN, _BAND = "var(--port)", "var(--golden)", "var(--band)"
_DIGITS = 4
_HEIGHT = 220
# Flips of each kind that the chart of margins shows.
_MOST_FLIPS = 400

Spec = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart: its id in the page, its title, a sentence on how to read it, and its specification."""

    name: str
    title: str
    reading: str
    spec: Spec


def draw_curves(comparison: Comparison) -> tuple[Chart, ...]:
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
        return ()
    sites = list(dict.fromkeys(str(row["site"]) for row in rows))
    blamed = [site for blame in comparison.blame if blame.layer is not None for site in blame.sites]
    chosen = next((site for site in blamed if site in sites), "output" if "output" in sites else sites[0])
    spec = _over_layers(
        rows, error="the port's error", extra=[_field("rho", "ρ"), _field("status", "status", "nominal")]
    )
    return (
        Chart(
            name="curve",
            title="Error over the layers",
            reading="The port's error at one site, relative to the golden's values. The band is the noise floor: what "
            "BF16 alone costs there.",
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


def draw_chain(curve: Curve | None) -> tuple[Chart, ...]:
    """Draw the error along a chained run; nothing for an isolated run."""
    if curve is None:
        return ()
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
    spec = _over_layers(
        rows, error="error of the output", extra=[_field("inherited", "inherited"), _field("rho", "ρ")]
    )
    inherited = {
        "mark": {"type": "line", "color": _FAINT, "strokeDash": [4, 3]},
        "encoding": {"y": {"field": "inherited", "type": "quantitative"}},
    }
    onset = "No layer adds more than noise to what it inherits."
    if curve.onset is not None:
        onset = f"Errors beyond noise begin at layer {curve.onset}."
        mark = {"type": "rule", "color": _PORT, "strokeDash": [2, 2]}
        rule = {"data": {"values": [{"layer": curve.onset}]}, "mark": mark}
        spec = {**spec, "layer": [*spec["layer"], rule]}
    return (
        Chart(
            name="chain",
            title="Error along the chain",
            reading="Error of each layer's output against the golden's (line), of its input (dashed), and what noise "
            f"makes of that input (band). {onset}",
            spec={**spec, "layer": [spec["layer"][0], inherited, *spec["layer"][1:]]},
        ),
    )


def draw_site(errors: SiteErrors, *, anchor: str) -> tuple[Chart, ...]:
    """Draw the errors of one site: their sizes, and where they lie."""
    against = "the float32 twin" if errors.has_twin else "the golden"
    picture = errors.picture
    unit = picture.unit
    histogram = Chart(
        name=f"sizes-{anchor}",
        title=f"Sizes of the errors against {against}",
        reading=_read_histogram(errors),
        spec=_histogram(errors),
    )
    where = Chart(
        name=f"picture-{anchor}",
        title="Error by token and channel",
        reading=f"Root mean square of each block of tokens and channels, in units of {unit}; dark is 1 and below.",
        spec=_picture(picture, unit=unit),
    )
    by_token = Chart(
        name=f"tokens-{anchor}",
        title="Error by token",
        reading=f"In units of {unit}, over all channels.",
        spec=_profile(picture.token_starts, picture.by_token, title="token", names=picture.token_names),
    )
    by_channel = Chart(
        name=f"channels-{anchor}",
        title="Error by channel",
        reading=f"In units of {unit}, over all tokens."
        + (f" Massive channels: {', '.join(map(str, picture.massive[:8]))}." if picture.massive else ""),
        spec=_profile(picture.channel_starts, picture.by_channel, title="channel"),
    )
    return histogram, where, by_token, by_channel


def draw_flips(comparison: Comparison) -> tuple[Chart, ...]:
    """Draw the flips of every layer, those that noise explains apart; nothing if no experts were compared."""
    results = [site for site in comparison.sites if site.routing is not None]
    rows = [
        {"layer": site.layer, "kind": kind, "tokens": count, "of": site.routing.num_tokens}
        for site in results
        if site.routing is not None
        for kind, count in (
            ("explained by noise", site.routing.num_explained),
            ("not explained", site.routing.num_unexplained),
        )
    ]
    if not rows:
        return ()
    total = sum(site.routing.num_flipped for site in results if site.routing is not None)
    return (
        Chart(
            name="flips",
            title="Tokens with other experts",
            reading=f"Flips by layer, {total} in all. Those that noise explains are no fault.",
            spec=_spec(
                {
                    "data": {"values": rows},
                    "height": 140,
                    "mark": {"type": "bar", "tooltip": True, "stroke": _INK, "strokeWidth": 0.5},
                    "encoding": {
                        "x": {
                            "field": "layer",
                            "type": "ordinal",
                            "axis": {"labelAngle": 0, "labelOverlap": True},
                        },
                        "y": {"field": "tokens", "type": "quantitative", "axis": {"tickMinStep": 1}},
                        "color": _two_colours(
                            "kind", ("explained by noise", "not explained"), (_BAND, _PORT)
                        ),
                        "tooltip": [
                            _field("layer", "layer"),
                            _field("kind", "flips", "nominal"),
                            _field("tokens", "tokens"),
                            _field("of", "of"),
                        ],
                    },
                }
            ),
        ),
    )


def draw_loads(routing: Sequence[LayerRouting], *, chosen: int | None) -> tuple[Chart, ...]:
    """Draw how many tokens each expert gets on both sides, in a layer that the reader chooses."""
    if not routing:
        return ()
    layers = [layer.layer for layer in routing]
    rows = [
        {"layer": layer.layer, "golden": list(layer.golden_load), "port": list(layer.port_load)}
        for layer in routing
    ]
    first = chosen if chosen in layers else max(routing, key=lambda layer: len(layer.flips)).layer
    x = {"field": "expert", "type": "quantitative", "axis": {"tickMinStep": 1}}
    tooltip = [_field("expert", "expert"), _field("golden", "golden"), _field("port", "port")]
    bar = {
        "mark": {"type": "bar", "color": _GOLDEN, "width": {"band": 0.8}},
        "encoding": {"x": {**x, "type": "ordinal", "axis": {"labelOverlap": True, "labelAngle": 0}}},
    }
    return (
        Chart(
            name="loads",
            title="Load of the experts",
            reading="Tokens that each expert gets: bars are the golden's, points the port's.",
            spec=_spec(
                {
                    "data": {"values": rows},
                    "height": 140,
                    "params": [
                        {
                            "name": "shown",
                            "value": first,
                            "bind": {"input": "select", "options": layers, "name": "layer "},
                        }
                    ],
                    "transform": [
                        {"filter": "datum.layer == shown"},
                        {"flatten": ["golden", "port"]},
                        {"window": [{"op": "row_number", "as": "number"}]},
                        {"calculate": "datum.number - 1", "as": "expert"},
                    ],
                    "encoding": {"x": bar["encoding"]["x"], "tooltip": tooltip},
                    "layer": [
                        {"mark": bar["mark"], "encoding": {"y": _quantity("golden", "tokens")}},
                        {
                            "mark": {"type": "point", "color": _PORT, "filled": True, "size": 24},
                            "encoding": {"y": _quantity("port", "tokens")},
                        },
                    ],
                }
            ),
        ),
    )


def draw_margins(routing: Sequence[LayerRouting]) -> tuple[Chart, ...]:
    """Draw the margin of every flip in units of what noise may turn round; nothing without flips or a floor."""
    rows = [
        {
            "layer": layer.layer,
            "token": f"row {flip.row}, token {flip.position}",
            "margin": _short(flip.margin),
            "reach": _short(max(flip.margin, 1e-12) / layer.reach),
            "kind": "explained by noise" if flip.is_explained else "not explained",
        }
        for layer in routing
        if layer.reach
        for flip in layer.flips
    ][: 2 * _MOST_FLIPS]
    if not rows:
        return ()
    rule = {
        "data": {"values": [{"reach": 1}]},
        "mark": {"type": "rule", "color": _INK, "strokeDash": [4, 3]},
        "encoding": {"y": {"field": "reach", "type": "quantitative"}},
    }
    return (
        Chart(
            name="margins",
            title="Margins of the flips",
            reading="Distance of the scores that changed places, in units of the largest that noise may turn round. "
            "Above the dashed line noise does not explain the flip.",
            spec=_spec(
                {
                    "height": 180,
                    "layer": [
                        {
                            "data": {"values": rows},
                            "mark": {"type": "point", "filled": True, "size": 36},
                            "encoding": {
                                "x": _layer_axis(),
                                "y": {**_log("reach", "margin ∕ reach")},
                                "color": _two_colours(
                                    "kind", ("explained by noise", "not explained"), (_GOLDEN, _PORT)
                                ),
                                "shape": {
                                    "field": "kind",
                                    "type": "nominal",
                                    "scale": {
                                        "domain": ["explained by noise", "not explained"],
                                        "range": ["circle", "triangle-up"],
                                    },
                                    "legend": None,
                                },
                                "tooltip": [
                                    _field("layer", "layer"),
                                    _field("token", "token", "nominal"),
                                    _field("margin", "margin"),
                                    _field("kind", "flip", "nominal"),
                                ],
                            },
                        },
                        rule,
                    ],
                }
            ),
        ),
    )


def draw_divergence(logits: LogitsEvidence) -> tuple[Chart, ...]:
    """Draw the divergence of the next-token distributions by position, with what noise foretells."""
    rows = [
        {"row": f"row {row}", "position": position, "kl": _positive(kl), "foreseen": _positive(foreseen)}
        for row, position, kl, foreseen in zip(
            logits.rows, logits.positions, logits.divergence, logits.foreseen, strict=True
        )
    ]
    names = list(dict.fromkeys(str(row["row"]) for row in rows))
    x = {"field": "position", "type": "quantitative", "title": "position", "axis": {"tickMinStep": 1}}
    tooltip = [
        _field("row", "row", "nominal"),
        _field("position", "position"),
        _field("kl", "KL"),
        _field("foreseen", "noise foretells"),
    ]
    return (
        Chart(
            name="divergence",
            title="KL divergence by position",
            reading="KL(golden ‖ port) in nats of the next token after each position (points), and what noise "
            "foretells (line).",
            spec=_spec(
                {
                    "data": {"values": rows},
                    "height": _HEIGHT,
                    "params": [
                        {
                            "name": "prompt",
                            "value": names[0],
                            "bind": {"input": "select", "options": names, "name": "prompt "},
                        }
                    ],
                    "transform": [{"filter": "datum.row == prompt"}],
                    "encoding": {"x": x, "tooltip": tooltip},
                    "layer": [
                        {
                            "mark": {"type": "line", "color": _GOLDEN, "strokeWidth": 2},
                            "encoding": {"y": _log("foreseen", "nats")},
                        },
                        {
                            "mark": {"type": "point", "color": _PORT, "filled": True, "size": 24},
                            "encoding": {"y": _log("kl", "nats")},
                        },
                    ],
                }
            ),
        ),
    )


def _over_layers(rows: Sequence[Mapping[str, Any]], *, error: str, extra: list[Spec]) -> dict[str, Any]:
    """Return a chart of errors over layers: a band up to the floor, and the error as a line with points."""
    tooltip = [_field("layer", "layer"), _field("error", error), _field("floor", "noise floor"), *extra]
    low = min((row[name] for row in rows for name in ("error", "floor") if row[name]), default=1e-6)
    shape = {
        "field": "status",
        "type": "nominal",
        "scale": {
            "domain": ["pass", "warn", "fail", "onset", ""],
            "range": ["circle", "triangle-up", "cross", "cross", "circle"],
        },
        "legend": None,
    }
    return _spec(
        {
            "data": {"values": list(rows)},
            "height": _HEIGHT,
            "encoding": {"x": _layer_axis(), "tooltip": tooltip},
            "layer": [
                {
                    "mark": {"type": "area", "color": _BAND, "line": {"color": _GOLDEN, "strokeWidth": 1}},
                    "encoding": {"y": _log("floor", "relative error"), "y2": {"datum": _short(low / 2)}},
                },
                {
                    "mark": {"type": "line", "color": _PORT, "strokeWidth": 2},
                    "encoding": {"y": _log("error", "relative error")},
                },
                {
                    "mark": {"type": "point", "color": _PORT, "filled": True, "size": 44},
                    "encoding": {"y": _log("error", "relative error"), "shape": shape},
                },
            ],
        }
    )


def _histogram(errors: SiteErrors) -> dict[str, Any]:
    histogram = errors.histogram
    sides = [("port", histogram.port)]
    if histogram.golden:
        sides.append(("golden", histogram.golden))
    rows = [
        {"side": side, "low": _short(low), "high": _short(high), "elements": count}
        for side, counts in sides
        for low, high, count in zip(histogram.edges[:-1], histogram.edges[1:], counts, strict=True)
    ]
    base = {
        "x": {**_log("low", "|error|"), "axis": {"format": "~e", "labelOverlap": True, "tickCount": 6}},
        "y": _quantity("elements", "elements"),
        "tooltip": [
            _field("side", "side", "nominal"),
            _field("low", "from"),
            _field("high", "to"),
            _field("elements", "elements"),
        ],
    }
    golden = {
        "transform": [{"filter": "datum.side == 'golden'"}],
        "mark": {"type": "bar", "color": _BAND, "stroke": _GOLDEN, "strokeWidth": 0.7},
        "encoding": {**base, "x2": {"field": "high"}},
    }
    port = {
        "transform": [{"filter": "datum.side == 'port'"}],
        "mark": {"type": "line", "interpolate": "step-after", "color": _PORT, "strokeWidth": 2},
        "encoding": base,
    }
    return _spec({"data": {"values": rows}, "height": _HEIGHT, "layer": [golden, port]})


def _picture(picture: ErrorPicture, *, unit: str) -> dict[str, Any]:
    """Return the picture; every row of data holds one block of tokens, which the browser unfolds."""
    starts = list(picture.channel_starts)
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
    return _spec(
        {
            "data": {"values": rows},
            "height": 260,
            "transform": [
                {"flatten": ["error"]},
                {"window": [{"op": "row_number", "as": "number"}], "groupby": ["token"]},
                {"calculate": f"{starts}[datum.number - 1]", "as": "channel"},
                {"calculate": f"{starts}[datum.number]", "as": "last"},
                {"calculate": "datum.last - 1", "as": "through"},
            ],
            "mark": {"type": "rect", "color": _PORT, "strokeWidth": 0},
            "encoding": {
                "x": {
                    "field": "channel",
                    "type": "quantitative",
                    "title": "channel",
                    "scale": {"nice": False},
                },
                "x2": {"field": "last"},
                "y": {
                    "field": "token",
                    "type": "quantitative",
                    "title": "judged token",
                    "scale": {"reverse": True, "nice": False},
                    "axis": {"tickMinStep": 1},
                },
                "y2": {"field": "end"},
                "opacity": {
                    "field": "error",
                    "type": "quantitative",
                    "scale": {
                        "type": "log",
                        "domain": [1, max(most, 2.0)],
                        "range": [0.06, 1.0],
                        "clamp": True,
                    },
                    "title": f"error ∕ {unit}",
                    "legend": {"orient": "top", "gradientLength": 160, "tickCount": 3},
                },
                "tooltip": [
                    _field("tokens", "tokens", "nominal"),
                    _field("channel", "channels from"),
                    _field("through", "to"),
                    _field("error", "error"),
                ],
            },
        }
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
    rule = {
        "data": {"values": [{"error": 1}]},
        "mark": {"type": "rule", "color": _FAINT, "strokeDash": [4, 3]},
        "encoding": {"y": {"field": "error", "type": "quantitative"}},
    }
    line = {
        "data": {"values": rows},
        "mark": {"type": "line", "interpolate": "step-after", "color": _PORT, "strokeWidth": 1.5},
        "encoding": {
            "x": {"field": "start", "type": "quantitative", "title": title, "scale": {"nice": False}},
            "y": _log("error", "error"),
            "tooltip": [_field("name", f"{title}s", "nominal"), _field("error", "error")],
        },
    }
    return _spec({"height": 140, "layer": [line, rule]})


def _read_histogram(errors: SiteErrors) -> str:
    histogram = errors.histogram
    equal = f"{histogram.num_equal} elements of the port have no error"
    if not errors.has_twin:
        return f"The golden keeps no float32 twin of the site. {equal}."
    return (
        "Line: the port. Bars: the golden, which is noise alone. Left of them is exact. "
        f"{equal}, {histogram.num_equal_golden} of the golden."
    )


def _spec(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"$schema": _SCHEMA, "width": "container", "config": _CONFIG, **body}


def _layer_axis() -> dict[str, Any]:
    return {
        "field": "layer",
        "type": "quantitative",
        "title": "layer",
        "axis": {"tickMinStep": 1},
        "scale": {"zero": False, "nice": False, "padding": 8},
    }


def _log(name: str, title: str) -> dict[str, Any]:
    return {
        "field": name,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log", "nice": True},
        "axis": {"format": ".0e", "tickCount": 5, "labelOverlap": True},
    }


def _quantity(name: str, title: str) -> dict[str, Any]:
    return {"field": name, "type": "quantitative", "title": title}


def _field(name: str, title: str, kind: str = "quantitative") -> dict[str, Any]:
    field: dict[str, Any] = {"field": name, "type": kind, "title": title}
    return {**field, "format": ".4~g"} if kind == "quantitative" else field


def _two_colours(name: str, words: Iterable[str], colours: Iterable[str]) -> dict[str, Any]:
    return {
        "field": name,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(words), "range": list(colours)},
        "legend": {"orient": "top"},
    }


def _positive(value: float | None) -> float | None:
    """Return a value that a logarithmic axis can show; None for others."""
    return _short(value) if value is not None and 0.0 < value < math.inf else None


def _short(value: float) -> float | None:
    """Round to four digits, which keeps the file small; None for NaN and infinity, which JSON lacks."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


_AXIS = {
    "labelColor": _INK,
    "titleColor": _INK,
    "domainColor": _FAINT,
    "tickColor": _FAINT,
    "gridColor": _GRID,
    "titleFontWeight": "normal",
    "labelFontSize": 11,
    "titleFontSize": 12,
}
_CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": _AXIS,
    "legend": {"labelColor": _INK, "titleColor": _INK, "titleFontWeight": "normal"},
    "rule": {"color": _INK},
}
