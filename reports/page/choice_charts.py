"""Charts of choices: experts, and next tokens."""

from __future__ import annotations

from collections.abc import Sequence

from minimax_tools.results.results import Comparison
from reports.page.charts import (
    BAND,
    GOLDEN,
    HEIGHT,
    INK,
    PORT,
    Chart,
    chart_spec,
    layer_axis,
    log_axis,
    positive,
    quantity,
    short,
    shown_field,
    two_marks,
)
from reports.page.evidence import LayerRouting, LogitsEvidence

# Flips that the chart of margins shows.
_MOST_FLIPS = 800
_KINDS = ("explained by noise", "not explained")


def draw_flips(comparison: Comparison) -> tuple[Chart, ...]:
    """Draw the flips of every layer, those that noise explains apart; nothing if no experts were compared."""
    results = [site for site in comparison.sites if site.routing is not None]
    rows = [
        {"layer": site.layer, "kind": kind, "tokens": count, "of": site.routing.num_tokens}
        for site in results
        if site.routing is not None
        for kind, count in (
            (_KINDS[0], site.routing.num_explained),
            (_KINDS[1], site.routing.num_unexplained),
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
            spec=chart_spec(
                {
                    "data": {"values": rows},
                    "height": 140,
                    "mark": {"type": "bar", "tooltip": True, "stroke": INK, "strokeWidth": 0.5},
                    "encoding": {
                        "x": {
                            "field": "layer",
                            "type": "ordinal",
                            "axis": {"labelAngle": 0, "labelOverlap": True},
                        },
                        "y": {"field": "tokens", "type": "quantitative", "axis": {"tickMinStep": 1}},
                        "color": two_marks("kind", _KINDS, (BAND, PORT)),
                        "tooltip": [
                            shown_field("layer", "layer"),
                            shown_field("kind", "flips", "nominal"),
                            shown_field("tokens", "tokens"),
                            shown_field("of", "of"),
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
    axis = {"labelOverlap": True, "labelSeparation": 4, "labelAngle": 0}
    x = {"field": "expert", "type": "ordinal", "axis": axis}
    bar = {"type": "bar", "color": BAND, "stroke": GOLDEN, "width": {"band": 0.8}}
    tooltip = [shown_field("expert", "expert"), shown_field("golden", "golden"), shown_field("port", "port")]
    return (
        Chart(
            name="loads",
            title="Load of the experts",
            reading="Tokens that each expert gets: bars are the golden's, points the port's.",
            spec=chart_spec(
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
                    "encoding": {"x": x, "tooltip": tooltip},
                    "layer": [
                        {"mark": bar, "encoding": {"y": quantity("golden", "tokens")}},
                        {
                            "mark": {"type": "point", "color": PORT, "filled": True, "size": 24},
                            "encoding": {"y": quantity("port", "tokens")},
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
            "margin": short(flip.margin),
            "reach": short(max(flip.margin, 1e-12) / layer.reach),
            "kind": _KINDS[0] if flip.is_explained else _KINDS[1],
        }
        for layer in routing
        if layer.reach
        for flip in layer.flips
    ][:_MOST_FLIPS]
    if not rows:
        return ()
    is_chained = any(layer.is_inherited for layer in routing)
    chained = " Layers of a chain are held against the golden itself, errors that they inherit included."
    chained = chained if is_chained else ""
    rule = {
        "data": {"values": [{"reach": 1}]},
        "mark": {"type": "rule", "color": INK, "strokeDash": [4, 3]},
        "encoding": {"y": {"field": "reach", "type": "quantitative"}},
    }
    return (
        Chart(
            name="margins",
            title="Margins of the flips",
            reading="Distance of the scores that changed places, in units of the largest that noise may turn round. "
            f"Above the dashed line noise does not explain the flip.{chained}",
            spec=chart_spec(
                {
                    "height": 180,
                    "layer": [
                        {
                            "data": {"values": rows},
                            "mark": {"type": "point", "filled": True, "size": 36},
                            "encoding": {
                                "x": layer_axis(),
                                "y": {**log_axis("reach", "margin ∕ reach")},
                                "color": two_marks("kind", _KINDS, (GOLDEN, PORT)),
                                "shape": two_marks("kind", _KINDS, ("circle", "triangle-up")),
                                "tooltip": [
                                    shown_field("layer", "layer"),
                                    shown_field("token", "token", "nominal"),
                                    shown_field("margin", "margin"),
                                    shown_field("kind", "flip", "nominal"),
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
        {"row": f"row {row}", "position": position, "kl": positive(kl), "foreseen": positive(foreseen)}
        for row, position, kl, foreseen in zip(
            logits.rows, logits.positions, logits.divergence, logits.foreseen, strict=True
        )
    ]
    names = list(dict.fromkeys(str(row["row"]) for row in rows))
    x = {"field": "position", "type": "quantitative", "title": "position", "axis": {"tickMinStep": 1}}
    tooltip = [
        shown_field("row", "row", "nominal"),
        shown_field("position", "position"),
        shown_field("kl", "KL"),
        shown_field("foreseen", "noise foretells"),
    ]
    return (
        Chart(
            name="divergence",
            title="KL divergence by position",
            reading="KL(golden ‖ port) in nats of the next token after each position (points), and what noise "
            "foretells (line). The errors of all layers are in it.",
            spec=chart_spec(
                {
                    "data": {"values": rows},
                    "height": HEIGHT,
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
                            "mark": {"type": "line", "color": GOLDEN, "strokeWidth": 2},
                            "encoding": {"y": log_axis("foreseen", "nats")},
                        },
                        {
                            "mark": {"type": "point", "color": PORT, "filled": True, "size": 24},
                            "encoding": {"y": log_axis("kl", "nats")},
                        },
                    ],
                }
            ),
        ),
    )
