from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest
from click.shell_completion import ShellComplete

from compare.cli import main as mm2_compare
from neuron.cli import main as mm2_test

GOLDEN, RUN = "kept/gpu_reference/full_model", "kept/neuron/sweep_0_to_3"


@pytest.fixture
def captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (GOLDEN, RUN):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "kept" / "gpu_reference" / "no_capture").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MM2_CAPTURES", "kept")


def complete(command: click.Command, *words: str, incomplete: str = "") -> list[str]:
    found = ShellComplete(command, {}, "mm2", "_MM2_COMPLETE").get_completions(list(words), incomplete)
    return [item.value for item in found]


def test_commands_options_and_choices_are_completed() -> None:
    assert complete(mm2_test, incomplete="sw") == ["sweep"]
    assert complete(mm2_test, "sweep", incomplete="--gol") == ["--golden"]
    assert complete(mm2_test, "sweep", "--backend", incomplete="x") == ["xla-cpu"]


@pytest.mark.usefixtures("captures")
def test_goldens_and_runs_are_completed_from_the_captures() -> None:
    assert complete(mm2_compare, "--golden") == [GOLDEN]
    assert complete(mm2_compare, "--gpu-path") == [GOLDEN]
    assert complete(mm2_compare, "--run") == [RUN]
    assert complete(mm2_test, "sweep", "--golden", incomplete="kept/") == [GOLDEN]
    assert complete(mm2_test, "sweep", "--captures", "elsewhere", "--golden") == [""]


@pytest.mark.usefixtures("captures")
def test_wrong_project_file_does_not_stop_a_completion() -> None:
    Path("mm2.toml").write_text("modle = 3")
    assert complete(mm2_compare, "--run") == [RUN]


def test_a_completion_asks_no_server(s3: Any) -> None:
    words = ("sweep", "--golden", "s3://lab/golden", "--output-dir", "s3://lab/run")
    assert complete(mm2_test, *words, incomplete="--backe") == ["--backend"]
    assert s3.requests == []


def test_bash_gets_its_script_from_the_supervised_program() -> None:
    environment = os.environ | {"_MM2_TEST_COMPLETE": "bash_source"}
    program = "import sys; sys.argv[0] = 'mm2-test'; from neuron.__main__ import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "_MM2_TEST_COMPLETE=bash_complete" in result.stdout
    assert "complete -o nosort -F _mm2_test_completion mm2-test" in result.stdout
