"""The error curve of a chained run: its error after each layer, and the first layer that adds more than noise.

The curve shows where a fault begins, and not which site is to blame: layers behind it inherit its error. An isolated
run, in which each layer gets the golden's input, shows a layer's own mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compare.noise.rows import TINY, InputError, square_difference, square_rows
from compare.sides.sides import Sides
from minimax_tools.capture.run_commands import RunCommands
from minimax_tools.capture.source import CaptureSource
from minimax_tools.metrics.noise_floor import massive_channels
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Curve, CurvePoint, SiteResult, SiteStatus


def measure_point(
    sides: Sides, layer: int, results: Mapping[Site, SiteResult], *, input_error: InputError | None
) -> CurvePoint | None:
    """Measure the error of a layer's output; None if it was not judged.

    `sides` hold the golden's own values, not a golden computed on the port's input, on which the `results` may rest.
    `input_error` is None for an input that is the golden's own.
    """
    result, rows = results.get(Site.OUTPUT), sides.read_rows(layer, Site.OUTPUT)
    if result is None or rows is None or result.nearest is None:
        return None
    golden, port = rows
    massive, noise = massive_channels(golden), result.noise
    error = square_difference(golden, port, massive=massive).whole
    size = square_rows(golden, massive=massive).whole
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
    """Return the curve of a comparison; None if the run is isolated, or no layer's output was judged.

    `points` and `results` are those of all layers, ascending. Since errors are inherited, the first failure is where
    the fault begins.
    """
    description = target.known_description
    if description is None or description.run.mode is not Mode.CHAINED or not points:
        return None
    failing = (result.layer for result in results if result.status is SiteStatus.FAIL)
    onset = next((layer for layer in failing if layer is not None), None)
    # A whole port's target is no layer, and its own report goes on to the suspect layer.
    has_command = target.read_passes() is None
    commands = RunCommands.of(golden, target)
    command = "" if onset is None or not has_command or commands is None else commands.single_layer(onset)
    return Curve(points=tuple(points), onset=onset, command=command)
