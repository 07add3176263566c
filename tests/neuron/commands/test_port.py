"""`mm2-test port`: a port judged in stages, each a process of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import click.testing
import jsonschema
import pytest

from neuron.cli import main as mm2_test

Judge = Callable[..., click.testing.Result]
REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "scripts" / "examples"
WRONG = """
import sys
sys.path.insert(0, {examples!r})
import port

class DecoderLayer(port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        tensors = tensors.copy()
        for expert in range(config.num_local_experts):
            gate, up = (f"block_sparse_moe.experts.{{expert}}.{{name}}.weight" for name in ("w1", "w3"))
            tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return super().convert_state_dict(tensors, config, layer_idx)
"""


@pytest.fixture
def judge(toy: Path, golden: Path, tmp_path: Path) -> Judge:
    """Judges a port of the toy on its golden: `judge(TARGET, *options)`."""

    def judge_port(target: str, *options: str) -> click.testing.Result:
        words = ["port", "--model", str(toy), "--golden", str(golden), "--target", target, "--backend", "cpu"]
        words += ["--output-dir", str(tmp_path / "out"), "--quiet", *options]
        return click.testing.CliRunner().invoke(mm2_test, words)

    return judge_port


def test_mistake_is_found_named_and_proved_and_only_a_changed_port_runs_again(
    judge: Judge, tmp_path: Path
) -> None:
    source = tmp_path / "wrong.py"
    source.write_text(WRONG.format(examples=str(EXAMPLES)))
    found = judge(f"{source}:DecoderLayer", "--json")
    assert found.exit_code == 1, found.output
    record = json.loads(found.stdout)
    schema = json.loads((REPOSITORY / "docs" / "schema" / "port.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(record)
    assert record["verdict"] == "fail"
    assert [stage["stage"] for stage in record["stages"]] == ["weights", "sweep", "diagnosis"]
    weights, _, diagnosis = (stage["output"] for stage in record["stages"])
    assert weights["findings"]
    assert {named["mistake"] for named in diagnosis["diagnosis"]} == {"gate_up_swapped"}
    assert record["next"] == diagnosis["next"]
    assert "gate_up_swapped" in (tmp_path / "out" / "report" / "report.md").read_text()

    # Done before: the run is gone, and the same is said.
    shutil.rmtree(tmp_path / "out" / "run")
    assert json.loads(judge(f"{source}:DecoderLayer", "--json").stdout) == record
    assert not (tmp_path / "out" / "run").exists()

    source.write_text(source.read_text() + "\nraise RuntimeError('out of luck')\n")
    broken = judge(f"{source}:DecoderLayer")
    assert broken.exit_code == 3
    assert "out of luck" in broken.stderr


@pytest.mark.slow
def test_right_port_goes_on_to_a_chain(judge: Judge, tmp_path: Path) -> None:
    target = f"{EXAMPLES / 'port.py'}:DecoderLayer"
    first = judge(target)
    assert first.exit_code == 0, first.output
    for command in ("mm2-test weights", "mm2-test sweep", "mm2-test full"):
        assert f"\n$ {command} " in first.stdout
    assert first.stdout.splitlines()[-4:] == [
        f"PASS: {target}",
        "  weights    right",
        "  sweep      right",
        "  chain      right",
    ]
    again = judge(target)
    assert again.stdout.count("(done before)") == 3
    # A log that cannot be read is no reason to stop.
    (tmp_path / "out" / "stages.json").write_text("[{]")
    assert judge(target).stdout.count("(done before)") == 0


def test_stage_that_cannot_be_carried_out_ends_the_call(judge: Judge, tmp_path: Path) -> None:
    source = tmp_path / "odd.py"
    source.write_text(
        "class DecoderLayer:\n    def __init__(self, config, layer_idx):\n        raise RuntimeError('no')\n"
    )
    result = judge(f"{source}:DecoderLayer", "--json")
    assert result.exit_code == 3
    record = json.loads(result.stdout)
    assert record["verdict"] == "incomparable"
    assert [(stage["stage"], stage["exit_code"]) for stage in record["stages"]] == [("weights", 3)]
