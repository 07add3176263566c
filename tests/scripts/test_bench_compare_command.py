"""The benchmark of the whole command, tried out at toy scale: its figures are there, whatever they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_compare_command.py"


@pytest.mark.slow
def test_it_gives_the_figures_that_it_is_named_for(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--scale", "toy", "--scratch", str(tmp_path), "--json"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)
    names = {figure["figure"] for figure in found["figures"]}
    assert {"cold_over_reading", "warm_over_reading", "share_of_memory_bandwidth", "peak_gb"} <= names
