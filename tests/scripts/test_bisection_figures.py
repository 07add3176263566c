"""The figures of bisection, and of the ends of chains that its limits come from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_chained_ends
from device.bisection import measure

pytestmark = pytest.mark.slow


def test_goals_of_bisection_hold() -> None:
    figures = {figure.figure: figure for figure in measure("toy")}
    assert all(figure.holds for figure in figures.values())
    assert figures["bisect_runs_62"].goal == "<= 7"
    assert figures["bisect_found_of_three"].value == 3
    assert figures["bisect_sees_alone_from_%"].value < figures["bisect_sees_in_chains_from_%"].value


def test_ends_of_chains_of_right_ports_are_within_their_limits() -> None:
    ends = list(
        bench_chained_ends.measure(
            "narrow", seed=0, dtype=torch.bfloat16, every=30, ports=(("builtin", "cpu"),)
        )
    )
    # Chains begin at layers 0, 30 and 60, the last of which the model ends.
    assert [end.length for end in ends] == [*range(1, 9), *range(1, 9), 1, 2]
    figures = {figure.figure: figure for figure in bench_chained_ends.figures(ends, torch.bfloat16)}
    assert all(figure.holds for figure in figures.values())
    assert figures["2 layers: largest lower_quartile"].value > 0
    assert figures["2 layers: false alarms of 3"].value == 0
