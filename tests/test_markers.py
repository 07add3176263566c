"""Markers and warnings in a plain pytest run, seen from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[1]
PLANTED = {
    "neuron": "@pytest.mark.neuron\ndef test_a(): assert False",
    "gpu": "@pytest.mark.gpu\ndef test_a(): assert False",
    "checkpoint": "@pytest.mark.checkpoint\ndef test_a(): assert False",
    "slow": "@pytest.mark.slow\ndef test_a(): pass",
    "unknown": "@pytest.mark.trainium\ndef test_a(): pass",
    "warning": "def test_a(): warnings.warn('old')",
    "expected": "@pytest.mark.xfail(reason='known')\ndef test_a(): pass",
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of one run over the planted tests, with this repository's settings."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "tests").mkdir()
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    shutil.copy(REPOSITORY / "tests/conftest.py", folder / "tests")
    for name, test in PLANTED.items():
        (folder / f"tests/test_{name}.py").write_text(f"import pytest, warnings\n{test}\n")
    environment = {name: value for name, value in os.environ.items() if name != "MM2_TEST_CHECKPOINT"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", "-rA", "--tb=line", "--continue-on-collection-errors"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device: nothing is missing")
def test_gpu_test_without_a_device_is_skipped_and_says_so(output: str) -> None:
    assert "test_gpu.py" in output
    assert "no CUDA device: torch.cuda.is_available() is False" in output
    assert "FAILED tests/test_gpu.py" not in output


@pytest.mark.skipif(any(Path("/dev").glob("neuron*")), reason="this machine has a Neuron device")
def test_neuron_test_without_a_device_is_skipped_and_says_so(output: str) -> None:
    assert "no AWS Neuron device: there is no /dev/neuron* on this machine" in output
    assert "FAILED tests/test_neuron.py" not in output


def test_checkpoint_test_without_a_checkpoint_is_skipped_and_says_how_to_name_one(output: str) -> None:
    assert "no checkpoint: set MM2_TEST_CHECKPOINT to a folder that holds MiniMax-M2" in output
    assert "FAILED tests/test_checkpoint.py" not in output


def test_plain_run_leaves_out_no_slow_test(output: str) -> None:
    assert "PASSED tests/test_slow.py::test_a" in output


def test_unknown_marker_is_an_error(output: str) -> None:
    assert "'trainium' not found in `markers`" in output
    assert "ERROR tests/test_unknown.py" in output


def test_warning_is_an_error(output: str) -> None:
    assert "FAILED tests/test_warning.py::test_a" in output


def test_expected_failure_that_passes_is_an_error(output: str) -> None:
    assert "FAILED tests/test_expected.py::test_a" in output
