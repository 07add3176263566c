"""The benchmark of starts measures every command, and its goals hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_start.py"


@pytest.mark.slow
def test_help_errors_of_usage_and_completions_are_light() -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--starts", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    record = json.loads(done.stdout)
    assert record["benchmark"] == "start"
    figures = {figure["figure"].partition(" (")[0]: figure for figure in record["figures"]}
    assert figures["commands measured"]["value"] == 36
    for what in ("help", "error of usage", "completion"):
        # Processor time is not held to its goal here: other tests may share the cores.
        assert figures[f"{what}, MB resident"]["holds"]
        assert (
            figures[f"{what}, MB resident"]["value"] < figures["Python with torch, MB resident"]["value"] / 2
        )
