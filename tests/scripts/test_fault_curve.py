"""The operating curve says what scaled limits say, though it runs and judges nothing again."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from faults.baseline import Baseline, BaselineRequest, open_baseline
from faults.cases import Case
from faults.curve import FACTORS, give_curve_figures, render_curve, trace_operating_curve
from faults.judging import as_black_box, judge_run
from faults.planted import choose_plants
from faults.port import PlantedPort
from faults.runs import run_port

from compare.limits.limits_file import calibrated_limits
from neuron.devices.runtime import open_runtime


def case(kind: str, *, run: str, excess: float, black_box_excess: float = 0.0) -> Case:
    return Case(
        run=run,
        baseline="a baseline",
        port="planted",
        backend="cpu",
        rows="prefill",
        layer=0,
        kind=kind,
        mistake="" if kind == "right" else "gate_up_swapped",
        sites=() if kind == "right" else ("moe_delta",),
        effects={} if kind == "right" else {"moe_delta": 9.0, "output": 2.0},
        excess={"moe_delta": excess, "output": 0.1},
        black_box_excess=black_box_excess,
    )


CASES = [
    case("catalogued", run="gross", excess=math.inf, black_box_excess=3.0),
    case("catalogued", run="faint", excess=1.3, black_box_excess=0.95),
    case("right", run="clean", excess=0.6, black_box_excess=0.7),
    case("right", run="cleaner", excess=0.55, black_box_excess=0.2),
]


def test_curve_counts_what_each_factor_would_fail() -> None:
    points = {point.factor: point for point in trace_operating_curve(CASES)}
    assert tuple(points) == FACTORS
    assert [points[factor].num_detected for factor in (0.5, 1.0, 1.25, 1.6, 2.0)] == [2, 2, 2, 1, 1]
    assert [points[factor].num_visible_detected for factor in (0.9, 1.0)] == [2, 1]
    assert [points[factor].num_alarms for factor in (0.5, 0.63, 0.8, 1.0)] == [2, 1, 0, 0]


def test_curve_is_printed_as_figures_and_as_a_table() -> None:
    figures = {figure.figure: figure.value for figure in give_curve_figures(trace_operating_curve(CASES))}
    assert figures["curve_1.6_detected_%"] == 50
    assert figures["curve_0.63_false_alarms"] == 1
    lines = render_curve(CASES).splitlines()
    assert len(lines) == 1 + len(FACTORS) + 2
    assert lines[5].split() == ["1.00", "2/2", "100.0", "%", "1/2", "50.0", "%", "0", "of", "2"]
    assert lines[-2].startswith("Right layers reach 0.7 of a limit at most")
    assert lines[-1].startswith("Mistakes above the floor reach 1.3 of a limit at least")


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    stage = BaselineRequest(name="curve", seed=0, lengths=(24, 7), num_layers=1, intermediate_size=128)
    with open_baseline(stage, tmp_path_factory.mktemp("faults")) as opened:
        yield opened


@pytest.mark.parametrize("name", ["", "moe_slightly_small", "gate_up_swapped"])
def test_kept_shares_of_limits_tell_what_scaled_limits_would_fail(
    name: str, baseline: Baseline, tmp_path: Path
) -> None:
    plant = choose_plants([name])[0] if name else None
    target = PlantedPort(plant=plant, layers=frozenset({0})).target()
    with open_runtime("cpu") as runtime:
        capture = run_port(baseline, target, runtime=runtime, directory=tmp_path / "run")
    for view, factor in ((capture, 0.63), (capture, 2.0), (as_black_box(capture), 0.63)):
        kept = judge_run(baseline, view).layers[0].excess
        scaled = judge_run(baseline, view, limits=calibrated_limits().scaled(factor)).layers[0]
        assert scaled.is_detected == (max(kept.values()) > factor)
