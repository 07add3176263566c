"""Curves: where a chained run's errors begin, and a table of its error after each layer."""

from __future__ import annotations

from minimax_tools.results.results import Curve, CurvePoint
from reports.canvas import Canvas, Column, Row
from reports.wording import word_figure

# Rows of the table; a longer one would hide the onset, the first layer that adds more than noise.
_MOST_ROWS = 16
_COLUMNS = (
    Column(title="layer"),
    Column(title="error"),
    Column(title="inherited"),
    Column(title="floor"),
    Column(title="ρ"),
    Column(title="", is_text=True),
)


def draw_curve(canvas: Canvas, curve: Curve | None, *, is_verbose: bool) -> None:
    """Draw the onset of errors, and with `is_verbose` the curve as a table; nothing for an isolated run."""
    if curve is None:
        return
    canvas.section("Error along the chain")
    if is_verbose:
        shown = _select_points(curve)
        canvas.table(_COLUMNS, [_row(point, is_onset=point.layer == curve.onset) for point in shown])
        if len(shown) < len(curve.points):
            canvas.paragraph(
                f"{len(curve.points) - len(shown)} more layers: --json has them all.", style="dim"
            )
    if curve.onset is None:
        canvas.paragraph("No layer adds more than noise to its inherited error.")
        return
    alone = " Run it alone to see its mistake." if curve.command else ""
    canvas.paragraph(f"Errors beyond noise begin at layer {curve.onset}.{alone}")


def _select_points(curve: Curve) -> tuple[CurvePoint, ...]:
    """Return all points; of many, the first, the last and those around the onset (without an onset, the last ones)."""
    points = curve.points
    if len(points) <= _MOST_ROWS:
        return points
    layers = [point.layer for point in points]
    # Between the first and the last, _MOST_ROWS - 2 points follow each other.
    middle = layers.index(curve.onset) if curve.onset in layers else len(points)
    start = min(max(middle - _MOST_ROWS // 2, 1), len(points) - _MOST_ROWS + 1)
    return (points[0], *points[start : start + _MOST_ROWS - 2], points[-1])


def _row(point: CurvePoint, *, is_onset: bool) -> Row:
    cells = (
        str(point.layer),
        word_figure(point.error),
        word_figure(point.handed_on),  # error of the layer's input
        word_figure(point.floor),
        word_figure(point.ratio),  # ρ; the error in units of its limit if the golden kept no floor
        "onset" if is_onset else "",
    )
    return Row(cells=cells, style="red" if is_onset else "")
