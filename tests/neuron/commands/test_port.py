"""`mm2-test port`: a port judged in stages, each a process of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import jsonschema
import pytest
import torch

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test
from neuron.commands.port_stages import StageLog, StageResult

Judge = Callable[..., click.testing.Result]
REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "scripts" / "examples"

SHALLOW = SyntheticModel(
    num_hidden_layers=1,
    hidden_size=64,
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=32,
    vocab_size=512,
)

IMPORTS = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import port
"""

SWAPPED = """
class DecoderLayer(port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        tensors = tensors.copy()
        for expert in range(config.num_local_experts):
            gate, up = (f"block_sparse_moe.experts.{expert}.{name}.weight" for name in ("w1", "w3"))
            tensors[gate], tensors[up] = tensors[up], tensors[gate]
        return super().convert_state_dict(tensors, config, layer_idx)
"""

# Wrong in its forward: no weight is.
WRONG_FORWARD = """
class DecoderLayer(port.DecoderLayer):
    def __init__(self, config, layer_idx):
        config.rope_theta = 10000.0
        super().__init__(config, layer_idx)
"""

# Damages its golden at the end of the sweep, so that nobody can ask why it is wrong.
DESTRUCTIVE = """
import atexit
from pathlib import Path
if "sweep" in sys.argv:
    atexit.register(Path({layer!r}).write_bytes, b"")
"""

# Its helper is imported when it runs: nothing tells mm2 of it before.
LAZY = """
class DecoderLayer(port.DecoderLayer):
    def forward(self, *arguments):
        from scale import FACTOR
        return FACTOR * super().forward(*arguments)
"""

CANNOT_BE_BUILT = """
def DecoderLayer(config, layer_idx):
    raise RuntimeError('no')
"""


@pytest.fixture(scope="module")
def shallow(make_model: Any) -> Path:
    """A small model with one layer: each wrong layer is proved in a process of its own."""
    made: Path = make_model(SHALLOW, torch.float8_e4m3fn)
    return made


@pytest.fixture(scope="module")
def shallow_golden(shallow: Path, make_golden: Callable[..., Path]) -> Path:
    """The golden of the small model with one layer."""
    return make_golden(shallow, "--seq-len", "24,15")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Writes a port beside the example port, and gives its `--target`."""

    def write_port(source: str) -> str:
        (tmp_path / "my_port.py").write_text(IMPORTS + source)
        return f"{tmp_path / 'my_port.py'}:DecoderLayer"

    return write_port


@pytest.fixture
def judge(command: Judge, tmp_path: Path) -> Judge:
    """Judges a port of a model: `judge(TARGET, *options)`; the golden is made unless it is given."""

    def judge_port(target: str, *options: object) -> click.testing.Result:
        words = ("--target", target, "--backend", "cpu", "--output-dir", tmp_path / "out", "--quiet")
        return command(mm2_test, "port", *words, *options)

    return judge_port


@pytest.fixture
def on_shallow(shallow: Path, shallow_golden: Path) -> tuple[object, ...]:
    return ("--model", shallow, "--golden", shallow_golden)


def exit_codes(record: dict[str, Any]) -> dict[str, int]:
    return {stage["stage"]: stage["exit_code"] for stage in record["stages"]}


def test_mistake_is_found_named_and_proved(
    judge: Judge, write: Callable[[str], str], on_shallow: tuple[object, ...], tmp_path: Path
) -> None:
    found = judge(write(WRONG_FORWARD), *on_shallow, "--json")
    assert found.exit_code == 1, found.output
    record = json.loads(found.stdout)
    schema = json.loads((REPOSITORY / "docs" / "schema" / "port.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(record)
    assert record["verdict"] == "fail"
    assert list(exit_codes(record)) == ["weights", "sweep", "diagnosis"]
    weights, _, diagnosis = (stage["output"] for stage in record["stages"])
    assert weights["findings"] == []
    assert {named["mistake"] for named in diagnosis["diagnosis"]} == {"rope_theta"}
    *told, again = record["next"]
    assert told == diagnosis["next"]
    assert again.startswith("mm2-test port --target ")
    markdown = (tmp_path / "out" / "report" / "report.md").read_text()
    assert "- layer 0: matches rope\\_theta (theta" in markdown


@pytest.mark.slow
def test_wrong_port_is_wrong_though_its_diagnosis_cannot_be_carried_out(
    judge: Judge, write: Callable[[str], str], shallow: Path, shallow_golden: Path, tmp_path: Path
) -> None:
    golden = shutil.copytree(shallow_golden, tmp_path / "golden")
    layer = golden / "layer_0.safetensors"
    target = write(WRONG_FORWARD + DESTRUCTIVE.format(layer=str(layer)))
    result = judge(target, "--model", shallow, "--golden", golden, "--json")
    assert result.exit_code == 1, result.output
    record = json.loads(result.stdout)
    assert (record["verdict"], exit_codes(record)) == ("fail", {"weights": 0, "sweep": 1, "diagnosis": 3})
    assert record["next"][0].startswith("mm2-diagnose ")
    shutil.copyfile(shallow_golden / layer.name, layer)
    # The stages that were finished are not run again.
    again = json.loads(judge(target, "--model", shallow, "--golden", golden, "--json").stdout)
    assert exit_codes(again) == {"weights": 0, "sweep": 1, "diagnosis": 1}


@pytest.mark.slow
def test_right_port_goes_on_to_a_chain_and_runs_again_when_what_it_reads_has_changed(
    judge: Judge, write: Callable[[str], str], on_shallow: tuple[object, ...], tmp_path: Path
) -> None:
    target = write(LAZY)
    (tmp_path / "scale.py").write_text("FACTOR = 1.0\n")
    first = judge(target, *on_shallow)
    assert first.exit_code == 0, first.output
    for command in ("mm2-test weights", "mm2-test sweep", "mm2-test full"):
        assert f"\n$ {command} " in first.stdout
    lines = (f"PASS: {target}", "  weights    right in layer 0", "  sweep      right", "  chain      right")
    assert "\n".join((*lines, "", "Not tested: ")) in first.stdout
    assert first.stdout.splitlines()[-1].count("several ranks") == 1
    (tmp_path / "scale.py").write_text("FACTOR = 1.5\n")
    again = judge(target, *on_shallow)
    assert again.exit_code == 1
    assert "(done before)" not in again.stdout


@pytest.mark.slow
def test_golden_is_made_once_and_again_when_it_is_gone_or_of_another_checkpoint_if_asked_to(
    judge: Judge, write: Callable[[str], str], shallow: Path, tmp_path: Path
) -> None:
    other, golden = tmp_path / "other", tmp_path / "out" / "golden"
    synthesize(other, model=SHALLOW, dtype=torch.float8_e4m3fn, shard_size_bytes=None, seed=1)
    for is_there in (False, True, False):
        result = judge(write(CANNOT_BE_BUILT), "--quick", "--model", shallow)
        assert result.exit_code == 3
        assert ("golden (done before)" in result.stdout) is is_there
        assert (golden / "manifest.json").exists()
        if is_there:
            shutil.rmtree(golden)
    codes = []
    for options in ((), ("--overwrite",)):
        result = judge(write(CANNOT_BE_BUILT), "--quick", "--json", "--model", other, *options)
        codes.append([*exit_codes(json.loads(result.stdout)).values()])
    assert codes == [[3], [0, 3]]


@pytest.mark.slow
def test_summary_tells_what_each_stage_found_and_how_to_go_on(
    judge: Judge, write: Callable[[str], str], on_shallow: tuple[object, ...]
) -> None:
    target = write(WRONG_FORWARD)
    text = judge(target, *on_shallow).stdout
    *shown, verdict, weights, sweep, diagnosis, _, title, prove, command = text.splitlines()
    assert "Next" not in shown
    assert prove.startswith("  mm2-test ")
    assert verdict == f"FAIL: {target}"
    told = f"no fault is seen in the weights of layer 0 in {target}, and the output differs"
    assert weights == f"  weights    right, with a warning: {told}"
    assert sweep.startswith("  sweep      wrong: layer 0, ")
    assert diagnosis.startswith("  diagnosis  wrong: layer 0, rope_theta (theta")
    assert title == "Next"
    assert command.startswith(f"  mm2-test port --target {target} --backend cpu --output-dir ")


@pytest.mark.slow
def test_weights_that_explain_all_end_the_search(
    judge: Judge, write: Callable[[str], str], on_shallow: tuple[object, ...]
) -> None:
    target = write(SWAPPED)
    told = judge(target, *on_shallow).stdout
    verdict, weights, sweep = told.splitlines()[-6:-3]
    cause = "w1 (gate) and w3 (up) are swapped"
    assert verdict == f"FAIL: {target}: the weights are wrong: {cause}"
    told_by_trace = f"the weights of layer 0 in {target} are wrong: {cause}; nothing else is wrong"
    assert weights == f"  weights    wrong: {told_by_trace}"
    assert sweep == "  sweep      wrong: layer 0, moe_delta"
    assert "mm2-diagnose" not in told
    assert "no known mistake" not in told


def test_stage_that_cannot_be_carried_out_ends_the_call(
    judge: Judge, write: Callable[[str], str], on_shallow: tuple[object, ...]
) -> None:
    result = judge(write(CANNOT_BE_BUILT), *on_shallow, "--json")
    assert result.exit_code == 3
    record = json.loads(result.stdout)
    assert (record["verdict"], exit_codes(record)) == ("incomparable", {"weights": 3})


def test_folder_that_is_no_golden_ends_it_before_the_first_stage(
    judge: Judge, toy: Path, tmp_path: Path
) -> None:
    result = judge("builtin", "--model", toy, "--golden", tmp_path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"no capture at {tmp_path}" in result.stderr
    assert not (tmp_path / "out").exists()


class TestStageLog:
    """The finished stages, from which an interrupted call goes on."""

    # The quickest command there is.
    COMMAND = ("mm2-gpu", "--version")

    def test_interrupted_call_goes_on_and_a_finished_one_keeps_its_golden_alone(self, tmp_path: Path) -> None:
        log = StageLog(tmp_path)
        # Options such as --quiet make no other command.
        result = log.run("golden", ("mm2-gpu",), "--version", source_digest="", is_shown=False)
        assert log.find("golden", ("mm2-gpu",), source_digest="") == result
        log.run("golden", self.COMMAND, source_digest="", is_shown=False)
        result = log.run("sweep", self.COMMAND, source_digest="a port's", is_shown=False)
        assert (result.exit_code, result.record) == (0, None)
        again = StageLog(tmp_path)
        assert again.find("sweep", self.COMMAND, source_digest="a port's") == result
        assert again.find("sweep", self.COMMAND, source_digest="another port's") is None
        assert again.find("sweep", (*self.COMMAND, "--json"), source_digest="a port's") is None
        again.finish()
        for one in (again, StageLog(tmp_path)):
            assert one.find("sweep", self.COMMAND, source_digest="a port's") is None
            assert one.find("golden", self.COMMAND, source_digest="") is not None
        path = tmp_path / "stages.json"
        path.write_text(path.read_text().replace('"exit_code": 0', '"exit_code": 99'))
        assert StageLog(tmp_path).find("golden", self.COMMAND, source_digest="") is None

    def test_stage_that_could_not_be_carried_out_is_not_kept(self, tmp_path: Path) -> None:
        log = StageLog(tmp_path)
        words = ("mm2-gpu", "no-such-command")
        assert log.run("golden", words, source_digest="", is_shown=False).exit_code == 2
        assert log.find("golden", words, source_digest="") is None

    @pytest.mark.parametrize("text", ["", "[{]", "{}", "[1]", None])
    def test_log_that_cannot_be_read_starts_anew(self, tmp_path: Path, text: str | None) -> None:
        path = tmp_path / "stages.json"
        path.mkdir() if text is None else path.write_text(text)
        assert StageLog(tmp_path).find("golden", self.COMMAND, source_digest="") is None


def test_commands_to_run_next_are_those_of_the_record() -> None:
    stage = StageResult(
        name="sweep",
        command="mm2-test sweep",
        source_digest="1",
        exit_code=1,
        text="FAIL: layer 1\n",
        headline="FAIL: layer 1",
        record={"next": ["mm2-test full"]},
        schema_version=2,
    )
    assert stage.next_commands == ("mm2-test full",)
    for found in (3, [1], "mm2-test", None):
        assert replace(stage, record={"next": found}).next_commands == ()
    assert replace(stage, record=None).next_commands == ()
