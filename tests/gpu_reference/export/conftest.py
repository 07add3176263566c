"""Goldens to export, and reports written from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gpu_reference.cli import main

# Of the golden `golden`, as in the conftest of all tests.
LENGTHS = "48,33"
NUM_DECODED = 2


def make_golden(directory: Path, model: Path, *options: str) -> Path:
    arguments = ["extract-all", "--model", str(model), "--output-dir", str(directory), "--quiet", *options]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return directory


@pytest.fixture(scope="session")
def float32_golden(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The float32 golden of the same tokens as `golden`, certified."""
    directory = tmp_path_factory.mktemp("float32") / "full_model"
    return make_golden(directory, toy, "--seq-len", LENGTHS, "--dtype", "float32", "--certify")


@pytest.fixture(scope="session")
def report(golden: Path, float32_golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of both; the last two tokens of each row were decoded."""
    output = tmp_path_factory.mktemp("report") / "accuracy_report"
    arguments = ["export", "--format", "vllm-neuron", "--golden", str(golden), "--output-dir", str(output)]
    arguments += ["--float32-golden", str(float32_golden), "--decode", str(NUM_DECODED), "--quiet"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return output
