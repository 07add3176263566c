"""The curve of a chained run: where the error begins, and the command that looks there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compare.chains.curve import trace_curve
from minimax_tools.capture.passes import ModelPasses
from minimax_tools.capture.reader import Capture
from minimax_tools.model.run import full_run, sweep_run
from minimax_tools.model.span import Span
from minimax_tools.results.results import Curve, CurvePoint, SiteResult, SiteStatus

POINTS = tuple(CurvePoint(layer=layer, error=0.1, handed_on=0.0, floor=0.01, ratio=9.0) for layer in range(4))


def result(layer: int | None, status: SiteStatus) -> SiteResult:
    return SiteResult(layer=layer, site="output", status=status)


WRONG = (
    result(0, SiteStatus.PASS),
    result(None, SiteStatus.FAIL),
    result(2, SiteStatus.FAIL),
    result(3, SiteStatus.FAIL),
)


class WholePort(Capture):
    """A run of a whole port."""

    def read_passes(self) -> ModelPasses | None:
        return ModelPasses(num_passes=1)


@pytest.fixture
def chained(copyist: Any) -> Capture:
    return Capture.open(copyist.device_run(run=full_run(4, sites_level="layer")))


def trace(golden: Path, target: Capture, *results: SiteResult) -> Curve | None:
    return trace_curve(POINTS, results, target=target, golden=Capture.open(golden))


def test_error_begins_at_the_first_failing_layer(golden: Path, chained: Capture) -> None:
    found = trace(golden, chained, *WRONG)
    assert found is not None
    assert (found.points, found.onset) == (POINTS, 2)
    assert "single-layer --layer 2" in found.command


def test_right_run_has_a_curve_and_no_command(golden: Path, chained: Capture) -> None:
    found = trace(golden, chained, *WRONG[:2])
    assert found is not None
    assert (found.onset, found.command) == (None, "")


def test_whole_port_is_not_run_as_a_layer(golden: Path, chained: Capture) -> None:
    found = trace(golden, WholePort(chained.directory, chained.manifest), *WRONG)
    assert found is not None
    assert (found.onset, found.command) == (2, "")


def test_isolated_run_has_no_curve(golden: Path, copyist: Any) -> None:
    isolated = Capture.open(copyist.device_run(run=sweep_run(Span(0, 4), sites_level="layer")))
    assert trace(golden, isolated, *WRONG) is None
