"""The curve of a chained run: how its error grows from layer to layer, and where it grows by more than noise.

It shows where a fault begins, not who is to blame: a layer behind it was handed other values than the golden's, and its
sites are judged by floors that are widened by them. What a layer itself does wrong, an isolated run tells.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from minimax_tools.capture.source import CaptureSource
from minimax_tools.results import Curve, CurvePoint, SiteResult, SiteStatus
from minimax_tools.run import Mode
from minimax_tools.sites import Site


def trace_curve(
    results: Sequence[SiteResult], *, target: CaptureSource, golden: CaptureSource
) -> Curve | None:
    """The curve of a comparison; None where the run is isolated, or no layer's output was judged.

    Args:
        results: Of every site, layers ascending.
        target: The device run.
        golden: The golden.
    """
    description = target.known_description
    if description is None or description.run.mode is not Mode.CHAINED:
        return None
    points = tuple(point for result in results if (point := _point(result)) is not None)
    if not points:
        return None
    onset = next(
        (result.layer for result in results if result.status is SiteStatus.FAIL and result.layer is not None),
        None,
    )
    return Curve(points=points, onset=onset, command="" if onset is None else _command(onset, target, golden))


def _point(result: SiteResult) -> CurvePoint | None:
    if result.layer is None or result.site != Site.OUTPUT or result.metrics is None or result.nearest is None:
        return None
    error = result.metrics.relative_l2
    if result.noise is not None:
        return CurvePoint(
            layer=result.layer,
            error=error,
            handed_on=result.noise.incoming,
            floor=result.noise.floor,
            ratio=result.noise.whole,
        )
    handed_on = result.relative.incoming if result.relative is not None else 0.0
    return CurvePoint(
        layer=result.layer, error=error, handed_on=handed_on, floor=None, ratio=result.nearest.excess
    )


def _command(layer: int, target: CaptureSource, golden: CaptureSource) -> str:
    """What runs the layer alone, on the golden's own input."""
    description = target.known_description
    assert description is not None, "only a run that says what it is has a curve"
    provenance = description.provenance
    words = [
        *("mm2-test", "single-layer", "--layer", str(layer), "--model", provenance.model_source),
        *("--golden", str(golden.directory), "--target", provenance.target, "--sites", "all"),
    ]
    return shlex.join(words)
