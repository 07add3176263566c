from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from minimax_tools.capture.further import ALSO
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import RunCommands, after_golden, judge_port_of
from minimax_tools.model.run import Run, component_run, multi_layer_run, single_layer_run, sweep_run
from minimax_tools.model.span import Span

PORT = "my port.py:DecoderLayer"


@pytest.fixture
def commands(golden: Path) -> RunCommands:
    """The commands of a run of two ranks in float32; its description is the golden's with another port."""
    capture = Capture.open(golden)
    found = RunCommands.of(capture, capture, model="my model")
    assert found is not None
    assert found.port is not None
    provenance = replace(
        found.port.provenance,
        target=PORT,
        backend="cpu",
        dtypes={"weights": "float32"},
        options={"tp_degree": 2, "attn_implementation": "sdpa"},
    )
    run = sweep_run(Span(0, 4), sites_level="all")
    return replace(found, run="runs/a b", port=replace(found.port, provenance=provenance, run=run))


def test_same_run_again_has_the_port_its_place_and_what_changes_numbers(commands: RunCommands) -> None:
    *words, last = shlex.split(commands.again())
    # The mended port is another run than the one that lies there.
    assert last == "--overwrite"
    assert words[:4] == ["mm2-test", "sweep", "--layers", "0:4"]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert options == {
        "--model": "my model",
        "--golden": commands.golden,
        "--target": PORT,
        "--backend": "cpu",
        "--dtype": "float32",
        "--tp-degree": "2",
        "--output-dir": "runs/a b",
    }


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (single_layer_run(3, sites_level="all"), "mm2-test single-layer --layer 3 "),
        (multi_layer_run(Span(1, 3), sites_level="all"), "mm2-test multi-layer --layers 1:3 "),
        (component_run(2, "moe"), "mm2-test component --layer 2 --component moe "),
        (sweep_run(Span(0, 4), sites_level="layer").decoding(2), " --sites layer --decode 2 "),
    ],
)
def test_kind_of_the_run_its_sites_and_decoded_tokens_are_kept(
    commands: RunCommands, run: Run, words: str
) -> None:
    assert commands.port is not None
    assert words in replace(commands, port=replace(commands.port, run=run)).again()


def test_further_outputs_are_kept(commands: RunCommands) -> None:
    port = commands.port
    assert port is not None
    options = {**port.provenance.options, ALSO: ["cache=:output[1]", "gate=moe.gate"]}
    with_further = replace(port, provenance=replace(port.provenance, options=options))
    again = replace(commands, port=with_further).again()
    assert " --also 'cache=:output[1]' --also gate=moe.gate " in again


def test_compiled_layer_and_whole_port_have_no_conversion_to_trace(commands: RunCommands) -> None:
    assert commands.can_trace_weights
    assert not replace(commands, target="traced:layer_0.pt2").can_trace_weights
    assert not replace(commands, is_whole_port=True).can_trace_weights
    assert not replace(commands, port=None).can_trace_weights


def test_certified_golden_goes_on_to_a_port(golden: Path) -> None:
    (sweep,) = after_golden(Capture.open(golden), model="my model")
    assert sweep == f"mm2-test sweep --model 'my model' --golden {golden}"


def test_model_without_a_golden_gets_one_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MM2_CAPTURES", str(tmp_path))
    assert judge_port_of("model", "--target", PORT) == "mm2-gpu extract-all --model model"


def test_golden_in_the_working_directory_is_found_by_its_checkpoint(
    toy: Path, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MM2_CAPTURES", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(golden, tmp_path / "mine")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "manifest.json").write_text("{")
    assert (
        judge_port_of(str(toy), "--target", PORT)
        == f"mm2-test sweep --model {toy} --golden mine --target {shlex.quote(PORT)}"
    )
    other = tmp_path / "other"
    other.mkdir()
    assert judge_port_of(str(other)).startswith("mm2-gpu extract-all")
