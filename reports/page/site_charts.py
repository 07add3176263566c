"""Charts of one site: the sizes of its errors, and where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from reports.page.charts import (
    BAND,
    DECADES,
    FAINT,
    GOLDEN,
    HEIGHT,
    PORT,
    Chart,
    chart_spec,
    log_axis,
    positive,
    quantity,
    short,
    shown_field,
)
from reports.page.evidence import ErrorPicture, SiteErrors


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
        reading=f"Root mean square of each block of tokens and channels, in units of {unit}; faint is 1 and below.",
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


def _histogram(errors: SiteErrors) -> dict[str, Any]:
    histogram = errors.histogram
    sides = [("port", histogram.port)]
    if histogram.golden:
        sides.append(("golden", histogram.golden))
    rows = [
        {"side": side, "low": short(low), "high": short(high), "elements": count}
        for side, counts in sides
        for low, high, count in zip(histogram.edges[:-1], histogram.edges[1:], counts, strict=True)
    ]
    base = {
        "x": {
            **log_axis("low", "|error|"),
            "axis": {"values": DECADES, "format": "~e", "labelOverlap": True},
        },
        "y": quantity("elements", "elements"),
        "tooltip": [
            shown_field("side", "side", "nominal"),
            shown_field("low", "from"),
            shown_field("high", "to"),
            shown_field("elements", "elements"),
        ],
    }
    golden = {
        "transform": [{"filter": "datum.side == 'golden'"}],
        "mark": {"type": "rect", "color": BAND, "stroke": GOLDEN, "strokeWidth": 0.7},
        "encoding": {**base, "x2": {"field": "high"}, "y2": {"datum": 0}},
    }
    port = {
        "transform": [{"filter": "datum.side == 'port'"}],
        "mark": {"type": "line", "interpolate": "step-after", "color": PORT, "strokeWidth": 2},
        "encoding": base,
    }
    return chart_spec({"data": {"values": rows}, "height": HEIGHT, "layer": [golden, port]})


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
            "error": [short(value if value <= most else most) for value in blocks],
        }
        for start, end, name, blocks in zip(
            picture.token_starts, picture.token_starts[1:], picture.token_names, picture.blocks, strict=False
        )
    ]
    return chart_spec(
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
            "mark": {"type": "rect", "color": PORT, "strokeWidth": 0},
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
                    shown_field("tokens", "tokens", "nominal"),
                    shown_field("channel", "channels from"),
                    shown_field("through", "to"),
                    shown_field("error", "error"),
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
            "error": positive(value),
        }
        for place, (start, value) in enumerate(zip(starts, values, strict=False))
    ]
    if rows:
        rows.append({**rows[-1], "start": starts[-1]})
    rule = {
        "data": {"values": [{"error": 1}]},
        "mark": {"type": "rule", "color": FAINT, "strokeDash": [4, 3]},
        "encoding": {"y": {"field": "error", "type": "quantitative"}},
    }
    line = {
        "data": {"values": rows},
        "mark": {"type": "line", "interpolate": "step-after", "color": PORT, "strokeWidth": 1.5},
        "encoding": {
            "x": {"field": "start", "type": "quantitative", "title": title, "scale": {"nice": False}},
            "y": log_axis("error", "error"),
            "tooltip": [shown_field("name", f"{title}s", "nominal"), shown_field("error", "error")],
        },
    }
    return chart_spec({"height": 140, "layer": [line, rule]})


def _read_histogram(errors: SiteErrors) -> str:
    histogram = errors.histogram
    equal = f"{histogram.num_equal} elements of the port have no error"
    if not errors.has_twin:
        return f"The golden keeps no float32 twin of the site. {equal}."
    return (
        "Line: the port. Bars: the golden, which is noise alone. "
        f"{equal}, {histogram.num_equal_golden} of the golden."
    )
