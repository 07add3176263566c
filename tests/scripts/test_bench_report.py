"""The benchmark of the report page holds its goal of size, and keeps the files that it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_report.py"


@pytest.mark.slow
def test_page_of_a_whole_model_is_small_enough(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed: it is in the extra report")
    command = [sys.executable, str(SCRIPT), "--json", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    record = json.loads(done.stdout)
    figures = {figure["figure"]: figure for figure in record["figures"]}
    assert record["benchmark"] == "report"
    assert figures["MB of report.html"]["holds"]
    assert (tmp_path / "report.html").stat().st_size < 6e6
    assert figures.get("lines on the console", {"holds": True})["holds"]
