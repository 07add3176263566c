from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import click.testing
import pytest

from compare.catalogue.catalogue import CATALOGUE
from compare.diagnosis.cli import main as mm2_diagnose
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

SCRIPTS = Path(__file__).parents[2] / "scripts"
NUM_CASES = 10


@pytest.fixture(scope="module")
def cases(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """The ports of the skill's measurement."""
    return load_module(SCRIPTS / "skill_ports" / "cases.py")


def sweep(
    command: Command, source: str, toy: Path, golden: Path, folder: Path, *options: object
) -> click.testing.Result:
    (folder / "port.py").write_text(source)
    words = ("--model", toy, "--golden", golden, "--target", f"{folder / 'port.py'}:DecoderLayer")
    words = (*words, "--backend", "cpu", "--output-dir", folder / "run", "--json", "--quiet", *options)
    return command(mm2_test, "sweep", *words)


def test_right_port_passes_at_every_site(
    cases: ModuleType, toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    record = json.loads(sweep(command, cases.right_source(), toy, golden, tmp_path).stdout)
    assert (record["verdict"], record["compared"]) == ("pass", record["of"])


@pytest.mark.parametrize("number", range(1, NUM_CASES + 1))
def test_every_case_fails(
    cases: ModuleType, number: int, toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    # Every layer has the mistake: one tells.
    result = sweep(command, cases.CASES[number - 1].source, toy, golden, tmp_path, "--layers", "1:2")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["blame"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, NUM_CASES + 1))
def test_diagnosis_names_what_the_catalogue_knows_and_nothing_else(
    cases: ModuleType, number: int, toy: Path, golden: Path, command: Command, tmp_path: Path
) -> None:
    case = cases.CASES[number - 1]
    sweep(command, case.source, toy, golden, tmp_path)
    sides = ("--golden", golden, "--run", tmp_path / "run")
    record = json.loads(command(mm2_diagnose, "--model", toy, *sides, "--json", "--quiet").stdout)
    assert {finding["mistake"] for finding in record["diagnosis"]} == {case.mistake} - {""}


def test_seven_cases_are_in_the_catalogue_and_three_are_not(cases: ModuleType) -> None:
    known = [case.mistake for case in cases.CASES if case.mistake]
    assert len(cases.CASES) == NUM_CASES
    assert (len(known), len(set(known))) == (7, 7)
    assert set(known) <= set(CATALOGUE)


def test_case_that_changes_nothing_is_refused(cases: ModuleType) -> None:
    with pytest.raises(ValueError, match="the right port holds 0 times: no such line"):
        _ = cases.PlantedCase(what="", right="no such line", wrong="").source


@pytest.mark.slow
def test_script_writes_cases_without_the_key_and_a_golden_that_judges_a_repair(
    command: Command, tmp_path: Path
) -> None:
    script = [sys.executable, SCRIPTS / "measure_skill.py", "--output", tmp_path / "cases"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder, evaluator = tmp_path / "cases" / "case_2", tmp_path / "cases" / "evaluator"
    assert sorted(path.name for path in folder.iterdir()) == ["golden", "model", "port.py"]
    key = json.loads((evaluator / "key.json").read_text())
    assert [entry["case"] for entry in key] == list(range(1, NUM_CASES + 1))
    port = (folder / "port.py").read_text()
    assert key[1]["what"] not in port
    assert "evaluator" not in (folder / "golden" / "manifest.json").read_text()
    repaired = port.replace(key[1]["wrong"], key[1]["repair"])
    for source, exit_code in ((port, 1), (repaired, 0)):
        judged = sweep(
            command, source, evaluator / "model", evaluator / "hidden_golden", folder, "--overwrite"
        )
        assert judged.exit_code == exit_code
    record = json.loads(judged.stdout)
    assert (record["verdict"], record["compared"]) == ("pass", record["of"])
