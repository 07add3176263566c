"""`mm2-test port`: a port judged in stages, each a process of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click.testing
import jsonschema
import pytest
import torch

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
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

# Wrong in its forward: no weight is.
WRONG_FORWARD = """
import sys
sys.path.insert(0, {examples!r})
import port

class DecoderLayer(port.DecoderLayer):
    def __init__(self, config, layer_idx):
        config.rope_theta = 10000.0
        super().__init__(config, layer_idx)
"""

SHALLOW = SyntheticModel(
    num_hidden_layers=1,
    hidden_size=64,
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=32,
    vocab_size=512,
)

# Its helper is imported when it runs: nothing tells mm2 of it before.
LAZY = """
import sys
sys.path.insert(0, {examples!r})
import port

class DecoderLayer(port.DecoderLayer):
    def forward(self, *arguments):
        from scale import FACTOR
        return FACTOR * super().forward(*arguments)
"""


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with one layer: each wrong layer is proved in a process of its own."""
    folder = tmp_path_factory.mktemp("shallow") / "shallow"
    synthesize(folder, model=SHALLOW, dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=0)
    return folder


@pytest.fixture(scope="module")
def shallow_golden(shallow: Path, make_golden: Callable[..., Path]) -> Path:
    """The golden of the toy with one layer."""
    return make_golden(shallow, "--seq-len", "48,33")


@pytest.fixture
def judge(shallow: Path, shallow_golden: Path, tmp_path: Path) -> Judge:
    """Judges a port of two layers on their golden: `judge(TARGET, *options)`."""

    def judge_port(target: str, *options: str) -> click.testing.Result:
        words = ["port", "--model", str(shallow), "--golden", str(shallow_golden), "--backend", "cpu"]
        words += ["--target", target]
        words += ["--output-dir", str(tmp_path / "out"), "--quiet", *options]
        return click.testing.CliRunner().invoke(mm2_test, words)

    return judge_port


# A wrong port that damages its golden at the end of the sweep, so that nobody can ask why it is wrong.
DESTRUCTIVE = (
    WRONG_FORWARD
    + """
import atexit
from pathlib import Path
if "sweep" in sys.argv:
    atexit.register(Path({layer!r}).write_bytes, b"")
"""
)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A wrong port judged twice: its golden is damaged when its diagnosis begins, and then whole again."""

    folder: Path
    first: click.testing.Result
    again: click.testing.Result


@pytest.fixture(scope="module")
def judged(shallow: Path, shallow_golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("judged")
    golden = shutil.copytree(shallow_golden, folder / "golden")
    layer = golden / "layer_0.safetensors"
    source = folder / "wrong.py"
    source.write_text(DESTRUCTIVE.format(examples=str(EXAMPLES), layer=str(layer)))
    words = [
        "port",
        "--model",
        str(shallow),
        "--golden",
        str(golden),
        "--backend",
        "cpu",
        "--quiet",
        "--json",
    ]
    words += ["--target", f"{source}:DecoderLayer", "--output-dir", str(folder / "out")]
    first = click.testing.CliRunner().invoke(mm2_test, words)
    shutil.copyfile(shallow_golden / layer.name, layer)
    # The stages that were finished are not run again.
    again = click.testing.CliRunner().invoke(mm2_test, words)
    return Judged(folder=folder, first=first, again=again)


def test_mistake_is_found_named_and_proved(judged: Judged) -> None:
    found, output_dir = judged.again, judged.folder / "out"
    assert found.exit_code == 1, found.output
    record = json.loads(found.stdout)
    schema = json.loads((REPOSITORY / "docs" / "schema" / "port.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(record)
    assert record["verdict"] == "fail"
    assert [stage["stage"] for stage in record["stages"]] == ["weights", "sweep", "diagnosis"]
    weights, _, diagnosis = (stage["output"] for stage in record["stages"])
    assert weights["findings"] == []
    assert {named["mistake"] for named in diagnosis["diagnosis"]} == {"rope_theta"}
    *told, again = record["next"]
    assert told == diagnosis["next"]
    assert again.startswith("mm2-test port --model ")
    assert again.endswith(f" --output-dir {output_dir}")
    markdown = (output_dir / "report" / "report.md").read_text()
    assert "- layer 0: matches rope\\_theta (theta" in markdown


def test_wrong_port_is_wrong_though_its_diagnosis_cannot_be_carried_out(judged: Judged) -> None:
    result = judged.first
    assert result.exit_code == 1, result.output
    record = json.loads(result.stdout)
    assert record["verdict"] == "fail"
    assert [(stage["stage"], stage["exit_code"]) for stage in record["stages"]][1:] == [
        ("sweep", 1),
        ("diagnosis", 3),
    ]
    assert record["next"][0].startswith("mm2-diagnose ")


@pytest.mark.slow
def test_right_port_goes_on_to_a_chain(judge: Judge, tmp_path: Path) -> None:
    target = f"{EXAMPLES / 'port.py'}:DecoderLayer"
    first = judge(target)
    assert first.exit_code == 0, first.output
    for command in ("mm2-test weights", "mm2-test sweep", "mm2-test full"):
        assert f"\n$ {command} " in first.stdout
    lines = ["weights    right in layer 0", "sweep      right", "chain      right"]
    assert (
        "\n".join((f"PASS: {target}", *(f"  {line}" for line in lines), "", "Not tested: ")) in first.stdout
    )
    assert first.stdout.splitlines()[-1].count("several ranks") == 1


@pytest.mark.slow
def test_finished_port_runs_again_and_what_it_reads_while_it_runs_counts(
    judge: Judge, tmp_path: Path
) -> None:
    (tmp_path / "scale.py").write_text("FACTOR = 1.0\n")
    source = tmp_path / "lazy.py"
    source.write_text(LAZY.format(examples=str(EXAMPLES)))
    assert judge(f"{source}:DecoderLayer").exit_code == 0
    (tmp_path / "scale.py").write_text("FACTOR = 1.5\n")
    again = judge(f"{source}:DecoderLayer")
    assert again.exit_code == 1
    assert "(done before)" not in again.stdout


@pytest.mark.slow
def test_golden_is_made_once_and_again_when_it_is_gone(toy: Path, tmp_path: Path) -> None:
    source = tmp_path / "odd.py"
    source.write_text("def DecoderLayer(config, layer_idx):\n    raise RuntimeError('no')\n")
    words = ["port", "--model", str(toy), "--target", f"{source}:DecoderLayer", "--backend", "cpu", "--quiet"]
    words += ["--output-dir", str(tmp_path / "out")]
    for is_there in (False, True, False):
        result = click.testing.CliRunner().invoke(mm2_test, words)
        assert result.exit_code == 3
        assert ("golden (done before)" in result.stdout) is is_there
        assert (tmp_path / "out" / "golden" / "manifest.json").exists()
        if is_there:
            shutil.rmtree(tmp_path / "out" / "golden")


@pytest.mark.slow
def test_golden_of_another_checkpoint_is_replaced_if_asked_to(shallow: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    synthesize(other, model=SHALLOW, dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=1)
    source = tmp_path / "odd.py"
    source.write_text("def DecoderLayer(config, layer_idx):\n    raise RuntimeError('no')\n")
    words = ["port", "--target", f"{source}:DecoderLayer", "--backend", "cpu", "--quick", "--quiet", "--json"]
    words += ["--output-dir", str(tmp_path / "out"), "--model"]
    codes = []
    for options in ([str(shallow)], [str(other)], [str(other), "--overwrite"]):
        result = click.testing.CliRunner().invoke(mm2_test, [*words, *options])
        codes.append([stage["exit_code"] for stage in json.loads(result.stdout)["stages"]])
    assert codes == [[0, 3], [3], [0, 3]]


@pytest.mark.slow
def test_summary_tells_what_each_stage_found_and_how_to_go_on(
    judge: Judge, tmp_path: Path, shallow: Path, shallow_golden: Path
) -> None:
    source = tmp_path / "wrong.py"
    source.write_text(WRONG_FORWARD.format(examples=str(EXAMPLES)))
    target = f"{source}:DecoderLayer"
    *shown, verdict, weights, sweep, diagnosis, _, title, prove, command = judge(target).stdout.splitlines()
    assert "Next" not in shown
    assert prove.startswith("  mm2-test ")
    assert verdict == f"FAIL: {target}"
    told = f"no fault is seen in the weights of layer 0 in {target}, and the output differs"
    assert weights == f"  weights    right, with a warning: {told}"
    assert sweep.startswith("  sweep      wrong: layer 0, ")
    assert diagnosis.startswith("  diagnosis  wrong: layer 0, rope_theta (theta")
    assert title == "Next"
    options = f"--model {shallow} --golden {shallow_golden} --backend cpu --target {target}"
    assert command.startswith(f"  mm2-test port {options} ")
    assert command.endswith(f" --output-dir {tmp_path / 'out'}")


@pytest.mark.slow
def test_weights_that_explain_all_end_the_search(judge: Judge, tmp_path: Path) -> None:
    source = tmp_path / "wrong.py"
    source.write_text(WRONG.format(examples=str(EXAMPLES)))
    target = f"{source}:DecoderLayer"
    told = judge(target).stdout
    verdict, weights, sweep = told.splitlines()[-6:-3]
    cause = "w1 (gate) and w3 (up) are swapped"
    assert verdict == f"FAIL: {target}: the weights are wrong: {cause}"
    told_by_trace = f"the weights of layer 0 in {target} are wrong: {cause}; nothing else is wrong"
    assert weights == f"  weights    wrong: {told_by_trace}"
    assert sweep == "  sweep      wrong: layer 0, moe_delta"
    assert "mm2-diagnose" not in told
    assert "no known mistake" not in told


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


def test_folder_that_is_no_golden_ends_it_before_the_first_stage(toy: Path, tmp_path: Path) -> None:
    words = ["port", "--model", str(toy), "--golden", str(tmp_path), "--output-dir", str(tmp_path / "out")]
    result = click.testing.CliRunner().invoke(mm2_test, words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"no capture at {tmp_path}" in result.stderr
    assert not (tmp_path / "out").exists()
