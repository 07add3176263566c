from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"
README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_demo_passes_the_right_port_and_blames_the_wrong_one(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    result = subprocess.run(
        [sys.executable, DEMO, "--output-dir", folder, "--backend", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL: layer 5, moe_delta" in result.stdout
    assert "Layer 5 matches gate_up_swapped" in result.stdout
    assert "mm2: fail, to blame: layer 5: moe_delta" in result.stdout
    assert "A class that → implements an iterable" in result.stdout
    assert "pass, 16 of 16 and 16 of 16" in result.stdout
    # Figures change with the machine.
    told = re.search(r"^```text\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert told is not None
    printed = re.sub(r"[\d.\s]", "", result.stdout)
    for line in told[1].splitlines():
        assert re.sub(r"[\d.\s]", "", line) in printed, line
    assert (folder / "captures" / "gpu_reference" / "full_model" / "manifest.json").exists()
