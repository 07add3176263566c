"""What a plain pytest run does with markers and warnings, seen from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[1]


def run_pytest(folder: Path, test: str) -> str:
    """The output of pytest over one planted test, with this repository's settings."""
    (folder / "tests").mkdir()
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    shutil.copy(REPOSITORY / "tests/conftest.py", folder / "tests")
    (folder / "tests/test_planted.py").write_text(f"import pytest, warnings\n{test}\n")
    environment = {name: value for name, value in os.environ.items() if name != "MM2_TEST_CHECKPOINT"}
    command = [sys.executable, "-m", "pytest", "-rs"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device: nothing is missing")
def test_marked_test_without_its_device_is_skipped_and_says_what_is_missing(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        "@pytest.mark.gpu\ndef test_a(): assert False\n"
        "@pytest.mark.checkpoint\ndef test_b(): assert False\n"
        "def test_c(): pass",
    )
    assert "1 passed, 2 skipped" in output
    assert "no CUDA device: torch.cuda.is_available() is False" in output
    assert "no checkpoint: set MM2_TEST_CHECKPOINT to a folder" in output


@pytest.mark.skipif(
    any(Path("/dev").glob("neuron*")), reason="this machine has a Neuron device: nothing is missing"
)
def test_neuron_test_without_a_device_is_skipped_and_says_so(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "@pytest.mark.neuron\ndef test_a(): assert False")
    assert "1 skipped" in output
    assert "no AWS Neuron device" in output


def test_plain_run_leaves_out_no_test(tmp_path: Path) -> None:
    assert "1 passed" in run_pytest(tmp_path, "@pytest.mark.slow\ndef test_a(): pass")


def test_unknown_marker_is_an_error(tmp_path: Path) -> None:
    assert "'trainium' not found in `markers`" in run_pytest(
        tmp_path, "@pytest.mark.trainium\ndef test_a(): pass"
    )


def test_warning_is_an_error(tmp_path: Path) -> None:
    assert "1 failed" in run_pytest(tmp_path, "def test_a(): warnings.warn('old')")


def test_expected_failure_that_passes_is_an_error(tmp_path: Path) -> None:
    assert "1 failed" in run_pytest(tmp_path, "@pytest.mark.xfail(reason='known')\ndef test_a(): pass")
