"""StageLog: the finished stages of `mm2-test port`, from which an interrupted call goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from neuron.commands.port_stages import StageLog, StageResult

# The quickest command there is.
COMMAND = ("mm2-gpu", "--version")
STAGE = StageResult(
    name="sweep",
    command="mm2-test sweep",
    source_digest="1",
    exit_code=1,
    text="FAIL: layer 1\n",
    headline="FAIL: layer 1",
    record={"next": ["mm2-test full"]},
    schema_version=2,
)


def test_interrupted_call_goes_on_and_a_finished_one_keeps_its_golden_alone(tmp_path: Path) -> None:
    log = StageLog(tmp_path)
    # Options such as --quiet make no other command.
    result = log.run("golden", ("mm2-gpu",), "--version", source_digest="", is_shown=False)
    assert log.find("golden", ("mm2-gpu",), source_digest="") == result
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
    path = tmp_path / "stages.json"
    path.write_text(path.read_text().replace('"exit_code": 0', '"exit_code": 99'))
    assert StageLog(tmp_path).find("golden", COMMAND, source_digest="") is None


def test_stage_that_could_not_be_carried_out_is_not_kept(tmp_path: Path) -> None:
    log = StageLog(tmp_path)
    words = ("mm2-gpu", "no-such-command")
    assert log.run("golden", words, source_digest="", is_shown=False).exit_code == 2
    assert log.find("golden", words, source_digest="") is None


@pytest.mark.parametrize("text", ["", "[{]", "{}", "[1]", None])
def test_log_that_cannot_be_read_starts_anew(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "stages.json"
    path.mkdir() if text is None else path.write_text(text)
    assert StageLog(tmp_path).find("golden", COMMAND, source_digest="") is None


def test_commands_to_run_next_are_those_of_the_record() -> None:
    assert STAGE.next_commands == ("mm2-test full",)
    for found in (3, [1], "mm2-test", None):
        assert replace(STAGE, record={"next": found}).next_commands == ()
    assert replace(STAGE, record=None).next_commands == ()
