"""The curve of a chained run: how its error grows from layer to layer, and where it grows by more than noise.

It shows where a fault begins, not which site is to blame: layers behind it inherit its error, which widens their
floors. An isolated run shows a layer's own mistakes.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from compare.noise.input_error import InputError
from compare.noise.squared_errors import TINY, square_difference, square_rows
from compare.sides.sides import Sides
from minimax_tools.capture.source import CaptureSource
from minimax_tools.metrics.noise_floor import massive_channels
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Curve, CurvePoint, SiteResult, SiteStatus


def measure_point(
    sides: Sides, layer: int, results: Mapping[Site, SiteResult], *, input_error: InputError | None
) -> CurvePoint | None:
    """Return how far a layer's output is from the golden's; None where it was not judged.

    Args:
        sides: The captures; the golden's own values, not those on the port's input.
        layer: The layer.
        results: Of its sites.
        input_error: The error of its input.
    """
    result, rows = results.get(Site.OUTPUT), sides.read_rows(layer, Site.OUTPUT)
    if result is None or rows is None or result.nearest is None:
        return None
    massive = massive_channels(rows[0])
    error, size = square_difference(*rows, massive=massive).whole, square_rows(rows[0], massive=massive).whole
    noise = result.noise
    return CurvePoint(
        layer=layer,
        error=float((error.sum() / size.sum().clamp(min=TINY)).sqrt()),
        handed_on=0.0 if input_error is None else input_error.overall,
        floor=None if noise is None else noise.floor,
        ratio=result.nearest.excess if noise is None else noise.whole,
    )


def trace_curve(
    points: Sequence[CurvePoint],
    results: Sequence[SiteResult],
    *,
    target: CaptureSource,
    golden: CaptureSource,
) -> Curve | None:
    """Trace the curve of a comparison; None where the run is isolated, or no layer's output was judged.

    Args:
        points: Of every layer, ascending.
        results: Of every site, layers ascending.
        target: The device run.
        golden: The golden.
    """
    description = target.known_description
    if description is None or description.run.mode is not Mode.CHAINED or not points:
        return None
    onset = next(
        (result.layer for result in results if result.status is SiteStatus.FAIL and result.layer is not None),
        None,
    )
    return Curve(
        points=tuple(points), onset=onset, command="" if onset is None else _command(onset, target, golden)
    )


def _command(layer: int, target: CaptureSource, golden: CaptureSource) -> str:
    """Return the command that runs the layer alone, on the golden's own input."""
    description = target.known_description
    assert description is not None, "only a run that says what it is has a curve"
    provenance = description.provenance
    words = [
        *("mm2-test", "single-layer", "--layer", str(layer), "--model", provenance.model_source),
        *("--golden", str(golden.directory), "--target", provenance.target, "--sites", "all"),
    ]
    return shlex.join(words)
