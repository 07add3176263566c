"""Files that mm2 wrote before its rooms were moved in November 2026 are read as they were, and printed as they were.

`old_files` holds a checkpoint, a golden with its certificate and generation, a sweep of a port whose layer 1 has gate
and up swapped, a run of the whole model, a plan, one slice of it, and what the commands printed of them as JSON.
Figures may differ by last bits from machine to machine: keys, verdicts, blame and mistakes may not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click import Command
from click.testing import CliRunner

from compare.cli import main as compare
from compare.diagnosis.cli import main as diagnose
from gpu_reference.cli import main as gpu
from minimax_tools.cli import mm2_split as split
from minimax_tools.printable import SCHEMA_VERSION
from neuron.cli import main as mm2_test

OLD = Path(__file__).with_name("old_files")
EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
_NEW_KEYS = {
    *("next", "schema_version", "regions", "model_config", "port_config"),
    *("right", "passed_over", "memory", "is_of_head", "passes"),
    *("further", "is_hint", "formulas", "refilled_error", "partial_repairs", "partial_error"),
    *("operation", "begins_at", "port", "untested", "weights", "wrong_weights"),
    *("is_of_weights", "in_chunks", "explains_all", "headline", "own_input_metrics", "wrong_tokens"),
    *("compiler", "graph_breaks", "recompiles"),
}
# Keys of schema version 1 that have another name since.
_RENAMED_KEYS = {"weight": "severity"}
FULL = ["full", "--seq-len", "7,4"]
BOTH_SIDES = ["--golden", "golden", "--run"]


def printed_before(name: str) -> Any:
    record = json.loads((OLD / "printed" / f"{name}.json").read_text(), object_hook=_rename_keys)
    return _without_new_keys(record)


def run(command: Command, *arguments: str) -> tuple[int, Any]:
    result = CliRunner().invoke(command, [*arguments, "--json"])
    assert result.stdout, result.stderr
    record = json.loads(result.stdout)
    assert isinstance(record["next"], list)
    assert record["schema_version"] == SCHEMA_VERSION
    return result.exit_code, _without_new_keys(record)


def _rename_keys(record: dict[str, Any]) -> dict[str, Any]:
    """Give keys the names that they have today."""
    return {_RENAMED_KEYS.get(key, key): value for key, value in record.items()}


def _without_new_keys(value: Any) -> Any:
    """Leave out the keys, however deep they are, that not all outputs had before; test_schemas.py holds them."""
    if isinstance(value, dict):
        return {key: _without_new_keys(one) for key, one in value.items() if key not in _NEW_KEYS}
    return [_without_new_keys(one) for one in value] if isinstance(value, list) else value


def shape_of(value: Any) -> Any:
    """Keys and kinds of values, however deep; a list by what its members have, and a figure whatever it is."""
    if isinstance(value, dict):
        # Which variables are set and which libraries are there, the machine decides.
        of_machine = {"environment", "versions"}
        return {key: type(one).__name__ if key in of_machine else shape_of(one) for key, one in value.items()}
    if isinstance(value, list):
        # Sentences come and go with what is known of a mistake.
        shapes = [shape_of(one) for one in value if not isinstance(one, str)]
        return [one for index, one in enumerate(shapes) if one not in shapes[:index]]
    return (
        "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__
    )


def write_swapped_port(folder: Path) -> Path:
    """The example port, with gate and up swapped in layer 1."""
    shutil.copy(EXAMPLES / "port.py", folder)
    text = (EXAMPLES / "swapped_port.py").read_text().replace("layer_idx == 5", "layer_idx == 1")
    (folder / "swapped_port.py").write_text(text)
    return folder / "swapped_port.py"


@pytest.fixture(autouse=True)
def beside_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work beside a copy: a diagnosis is kept in its run's folder."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")


@pytest.mark.parametrize(
    ("run_name", "printed"), [("swapped", "compare"), ("swapped", "swapped"), ("chained", "chained")]
)
def test_old_captures_are_judged_as_before(run_name: str, printed: str) -> None:
    before = printed_before(printed)
    code, now = run(compare, *BOTH_SIDES, run_name, "--model", "toy")
    # What mm2-test prints holds the comparison beside the run.
    before = {key: before[key] for key in before if key in now}
    assert code == (1 if before["verdict"] == "fail" else 0)
    for key in ("verdict", "compared", "of", "reference", "target", "criteria"):
        assert now[key] == before[key]
    blamed, blamed_before = (
        [(one["layer"], one["sites"]) for one in record["blame"]] for record in (now, before)
    )
    assert blamed == blamed_before
    assert shape_of(now) == shape_of(before)


def test_old_mistake_is_named_as_before() -> None:
    before = printed_before("diagnose")
    code, now = run(diagnose, *BOTH_SIDES, "swapped", "--model", "toy")
    assert code == 1
    assert now.pop("verdict") == "fail"
    assert [one["mistake"] for one in now["diagnosis"]] == ["gate_up_swapped"]
    assert shape_of(now) == shape_of(before)


@pytest.mark.parametrize(
    ("command", "run_name", "printed"),
    [(gpu, "golden", "show_golden"), (mm2_test, "swapped", "show_swapped")],
)
def test_old_captures_are_shown_as_before(command: Command, run_name: str, printed: str) -> None:
    assert run(command, "show", run_name) == (0, printed_before(printed))


def test_old_plan_and_slice_are_proved() -> None:
    code, now = run(split, "verify", "--plan", "plan.json", "--node", "a", "--slices", "slices")
    assert code == 0, now


def test_plan_is_written_as_before(tmp_path: Path) -> None:
    nodes = ["--node", "a:memory=1GB,layers=0:1", "--node", "b:memory=1GB,layers=1:2", "--planner", "manual"]
    code, now = run(split, "plan", "--model", "toy", *nodes, "--output", str(tmp_path / "plan.json"))
    assert (code, shape_of(now)) == (0, shape_of(printed_before("plan")))
    written, old = (json.loads((folder / "plan.json").read_text()) for folder in (tmp_path, OLD))
    assert shape_of(written) == shape_of(old)


@pytest.mark.parametrize(
    ("command", "arguments", "printed"),
    [
        (mm2_test, ["weights", "--layer", "1"], "weights"),
        (mm2_test, ["bisect", "--golden", "golden", "--output-dir", "{tmp}"], "bisect"),
        (gpu, [*FULL, "--max-new-tokens", "3", "--certify", "--output-dir", "{tmp}"], "golden"),
    ],
)
def test_commands_print_the_keys_that_they_did(
    tmp_path: Path, command: Command, arguments: list[str], printed: str
) -> None:
    target = ["--target", f"{write_swapped_port(tmp_path)}:DecoderLayer"] if command is mm2_test else []
    given = [one.format(tmp=tmp_path / "run") for one in arguments]
    _, now = run(command, *given, "--model", "toy", *target, "--quiet")
    assert shape_of(now) == shape_of(printed_before(printed))
