from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare.diagnosis.cli import main as mm2_diagnose
from minimax_tools.capture.reader import Capture


def test_diagnosis_stands_in_its_report(
    golden: Path, runs: dict[str, Capture], toy: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    sides = ("--gpu-path", golden, "--neuron-path", runs["swapped"].directory, "--model", toy, "--quiet")
    options = ("--mistake", "gate_up_swapped", "--report-path", tmp_path / "report")
    result = command(mm2_diagnose, *sides, *options)
    assert result.exit_code == 1
    assert f"written: {tmp_path / 'report' / 'report.md'}" in result.stdout
    markdown = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "- layer 1: ρ" in markdown
    assert "matches `gate_up_swapped`, leaves ρ" in markdown
    text = (tmp_path / "report" / "report.txt").read_text(encoding="utf-8")
    assert text.startswith("FAIL: ")
    assert "Layer 1 matches gate_up_swapped" in text
    record = json.loads((tmp_path / "report" / "comparison_report.json").read_text(encoding="utf-8"))
    assert record["verdict"] == "fail"
    assert record["next"][0].endswith("--prove")
