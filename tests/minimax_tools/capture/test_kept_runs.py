from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.resumption import (
    find_free_directory,
    holds_same,
    is_numbered,
    numbered_directories,
    refuse_other_run,
)
from minimax_tools.capture.writer import open_capture
from minimax_tools.errors import CaptureError
from minimax_tools.model.inputs import Inputs


@pytest.fixture
def keep(inputs: Inputs) -> Any:
    """Writes a capture, finished unless told otherwise."""

    def write(directory: Path, description: Description, *, is_finished: bool = True) -> Path:
        with open_capture(directory, description, inputs=inputs) as writer:
            if is_finished:
                writer.finish()
        return directory

    return write


def edited(description: Description) -> Description:
    """Return the description of the run once the port's file was edited."""
    return replace(description, provenance=replace(description.provenance, target_digest="e" * 64))


def test_free_place_and_same_run_keep_their_name(describe: Any, keep: Any, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    assert find_free_directory(sweep, describe()) == sweep
    keep(sweep, describe())
    assert find_free_directory(sweep, describe()) == sweep
    refuse_other_run(sweep, describe())


def test_other_finished_run_is_kept_and_told(
    describe: Any, keep: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep = keep(tmp_path / "sweep", describe())
    with caplog.at_level(logging.INFO):
        second = find_free_directory(sweep, edited(describe()))
    assert second == tmp_path / "sweep_2"
    assert f"since {sweep} holds another run (other target_digest)" in caplog.text
    assert "--overwrite" in caplog.text
    keep(second, edited(describe()))
    assert find_free_directory(sweep, edited(describe())) == second
    assert find_free_directory(sweep, describe(target="reference")) == tmp_path / "sweep_3"
    assert find_free_directory(sweep, describe()) == sweep


def test_other_unfinished_run_has_nothing_to_keep(describe: Any, keep: Any, tmp_path: Path) -> None:
    sweep = keep(tmp_path / "sweep", describe(), is_finished=False)
    assert find_free_directory(sweep, edited(describe())) == sweep
    refuse_other_run(sweep, edited(describe()))


def test_folder_of_something_else_is_not_written_into(describe: Any, keep: Any, tmp_path: Path) -> None:
    sweep = keep(tmp_path / "sweep", describe())
    (tmp_path / "sweep_2").mkdir()
    (tmp_path / "sweep_2" / "notes.txt").write_text("mine")
    assert find_free_directory(sweep, edited(describe())) == tmp_path / "sweep_3"


def test_refusal_names_the_difference_and_both_ways(describe: Any, keep: Any, tmp_path: Path) -> None:
    keep(tmp_path / "run", describe())
    with pytest.raises(CaptureError, match="another finished capture: found other target_digest") as error:
        refuse_other_run(tmp_path / "run", edited(describe()))
    assert "--overwrite" in str(error.value)
    assert "--output-dir" in str(error.value)


def test_numbered_folders_are_those_beside(describe: Any, keep: Any, tmp_path: Path) -> None:
    for name in ("sweep_0_to_3", "sweep_0_to_3_2", "sweep_0_to_31", "sweep_0_to_3_old"):
        keep(tmp_path / name, describe())
    sweep = tmp_path / "sweep_0_to_3"
    assert {path.name for path in numbered_directories(sweep)} == {"sweep_0_to_3", "sweep_0_to_3_2"}
    assert is_numbered(sweep, sweep)
    assert not is_numbered(tmp_path / "elsewhere" / "sweep_0_to_3_2", sweep)


def test_finished_capture_is_the_same_with_or_without_a_certificate(
    describe: Any, keep: Any, tmp_path: Path
) -> None:
    assert not holds_same(tmp_path / "gone", describe())
    keep(tmp_path / "golden", describe())
    assert holds_same(tmp_path / "golden", describe())


def test_configs_make_no_other_run(describe: Any, keep: Any, tmp_path: Path) -> None:
    keep(tmp_path / "run", describe())
    provenance = replace(describe().provenance, model_config={"rope_theta": 1}, port_config={"a": 1})
    refuse_other_run(tmp_path / "run", replace(describe(), provenance=provenance))
