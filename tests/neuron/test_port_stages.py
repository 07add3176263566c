"""StageLog: the finished stages of `mm2-test port`, from which an interrupted call goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuron.port_stages import StageLog, StageResult

# The quickest command there is.
COMMAND = ("mm2-gpu", "--version")


def stage(output: str) -> StageResult:
    return StageResult(
        name="sweep",
        command="mm2-test sweep",
        source_digest="1",
        exit_code=1,
        output=output,
        schema_version=2,
    )


def test_interrupted_call_goes_on_and_a_finished_one_keeps_its_golden_alone(tmp_path: Path) -> None:
    log = StageLog(tmp_path)
    log.run("golden", COMMAND, source_digest="", is_shown=False)
    result = log.run("sweep", COMMAND, source_digest="a port's", is_shown=False)
    assert (result.exit_code, result.record) == (0, None)
    again = StageLog(tmp_path)
    assert again.find("sweep", COMMAND, source_digest="a port's") == result
    assert again.find("sweep", COMMAND, source_digest="another port's") is None
    assert again.find("sweep", (*COMMAND, "--json"), source_digest="a port's") is None
    again.finish()
    for one in (again, StageLog(tmp_path)):
        assert one.find("sweep", COMMAND, source_digest="a port's") is None
        assert one.find("golden", COMMAND, source_digest="") is not None


def test_stage_that_could_not_be_carried_out_is_not_kept(tmp_path: Path) -> None:
    log = StageLog(tmp_path)
    words = ("mm2-gpu", "no-such-command")
    assert log.run("golden", words, source_digest="", is_shown=False).exit_code == 2
    assert log.find("golden", words, source_digest="") is None


def test_further_options_are_no_other_command(tmp_path: Path) -> None:
    log = StageLog(tmp_path)
    result = log.run("golden", ("mm2-gpu",), "--version", source_digest="", is_shown=False)
    assert result.output.startswith("__main__.py") or "0." in result.output
    assert log.find("golden", ("mm2-gpu",), source_digest="") == result


@pytest.mark.parametrize("text", ["", "[{]", "{}", "[1]"])
def test_log_that_cannot_be_read_starts_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "stages.json").write_text(text)
    assert StageLog(tmp_path).find("golden", COMMAND, source_digest="") is None


def test_log_that_is_no_file_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "stages.json").mkdir()
    assert StageLog(tmp_path).find("golden", COMMAND, source_digest="") is None
    assert f"Starting anew: {tmp_path / 'stages.json'} cannot be read" in caplog.text


def test_stage_that_the_log_never_keeps_is_not_found_in_it(tmp_path: Path) -> None:
    log = StageLog(tmp_path)
    log.run("golden", COMMAND, source_digest="", is_shown=False)
    path = tmp_path / "stages.json"
    path.write_text(path.read_text().replace('"exit_code": 0', '"exit_code": 99'))
    assert StageLog(tmp_path).find("golden", COMMAND, source_digest="") is None


@pytest.mark.parametrize(
    "text", ['{"next": 3}', '{"next": [1]}', '{"next": "mm2-test"}', "{}", '{"next": null}']
)
def test_output_that_lists_no_commands_advises_none(text: str) -> None:
    assert stage(text).next_commands == ()


def test_commands_to_run_next_are_told_apart_from_the_text() -> None:
    result = stage("FAIL: layer 1\n\nNext\n  mm2-diagnose --run a\n  mm2-test weights\n")
    assert result.text == "FAIL: layer 1\n\n"
    assert result.next_commands == ("mm2-diagnose --run a", "mm2-test weights")
    assert stage("PASS\n").next_commands == ()
    assert stage('{"next": ["mm2-test full"]}').next_commands == ("mm2-test full",)
