"""The device's benchmark, tried out at toy scale: its figures are there, whatever this machine makes of them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_device

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_device.py"
NAMED_IN_THE_ISSUE = {
    "graphs_for_62_layers",
    "compiles_after_first_layer",
    "sweep_over_bare",
    "regroup_peak_over_output",
    "regroup_over_memcpy",
    "bisect_runs_62",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(SCRIPT), "--scale", "toy", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_every_figure_of_the_issue_belongs_to_a_group() -> None:
    assert {name for names in bench_device.GROUPS.values() for name in names} >= NAMED_IN_THE_ISSUE


@pytest.mark.slow
@pytest.mark.parametrize("group", list(bench_device.GROUPS))
def test_group_gives_the_figures_that_it_is_named_for(group: str) -> None:
    if group in ("sweeping", "true_size") and importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed: sweeps are measured on its CPU device")
    result = run("--only", group, "--json")
    figures = {figure["figure"]: figure for figure in json.loads(result.stdout)["figures"]}
    assert set(bench_device.GROUPS[group]) <= set(figures), result.stderr
    if group == "sweeping":
        assert figures["graphs_for_62_layers"]["holds"]
        assert figures["compiles_after_first_layer"]["value"] == 0


def test_unknown_figure_is_wrong_usage() -> None:
    result = run("--only", "graphs")
    assert result.returncode == 2
    assert "no figure graphs: choose of bisect" in result.stderr
