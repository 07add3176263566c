from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from minimax_tools.capture.reader import Capture


def test_page_that_needs_a_package_is_told_on_stderr(
    golden: Path, runs: Any, command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    sides = ("--gpu-path", golden, "--neuron-path", runs["right"].directory, "--layer", "0", "--quiet")
    result = command(mm2_compare, *sides, "--json", "--report-path", tmp_path / "report")
    assert "report.html, whose charts need a package: pip install 'vl-convert-python>=1.9'" in result.stderr
    assert json.loads(result.stdout)["next"] is not None
    assert (tmp_path / "report" / "junit.xml").exists()


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_verdict_is_printed_though_its_report_cannot_be_written(
    golden: Path, runs: dict[str, Capture], command: Any, tmp_path: Path, form: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("no folder")
    sides = ("--golden", golden, "--run", runs["swapped"].directory, "--layer", "1", "--quiet", *form)
    result = command(mm2_compare, *sides, "--report-path", tmp_path / "file" / "report")
    assert result.exit_code == 3
    assert "cannot write the report" in result.stderr
    assert json.loads(result.stdout)["verdict"] == "fail" if form else result.stdout.startswith("FAIL: ")


def test_diagnosis_stands_in_its_report(
    golden: Path, runs: dict[str, Capture], toy: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    sides = ("--gpu-path", golden, "--neuron-path", runs["swapped"].directory, "--model", toy, "--quiet")
    options = ("--mistake", "gate_up_swapped", "--report-path", tmp_path / "report")
    result = command(mm2_diagnose, *sides, *options)
    assert result.exit_code == 1
    assert f"written: {tmp_path / 'report' / 'report.md'}" in result.stdout
    markdown = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "- layer 1: matches gate\\_up\\_swapped: leaves ρ" in markdown
    assert "  - Gate and up are exchanged: w3 is activated, and w1 is not. Look at " in markdown
    text = (tmp_path / "report" / "report.txt").read_text(encoding="utf-8")
    assert text.startswith("FAIL: ")
    assert "Layer 1 matches gate_up_swapped" in text
    record = json.loads((tmp_path / "report" / "comparison_report.json").read_text(encoding="utf-8"))
    assert record["verdict"] == "fail"
    assert record["next"][0].endswith("--prove")
