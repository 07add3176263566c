from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from minimax_tools.errors import CheckpointError
from minimax_tools.machine.files import new_folder


def test_block_that_ends_well_leaves_the_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "new", size_bytes=1, remedy="Make room.") as folder:
        (folder / "file").write_text("text")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new/file").read_text() == "text"


def test_error_of_reading_another_file_names_that_file(tmp_path: Path) -> None:
    missing, output = tmp_path / "source/config.json", tmp_path / "target/new"
    with (
        pytest.raises(CheckpointError, match=f"^{missing} cannot be read: found No such file") as caught,
        new_folder(output, size_bytes=1, remedy="Make room.") as folder,
    ):
        shutil.copyfile(missing, folder / "config.json")
    assert str(output) not in str(caught.value)
    assert not list(output.parent.iterdir())


def test_error_of_writing_names_the_output(tmp_path: Path) -> None:
    output = tmp_path / "new"
    with (
        pytest.raises(CheckpointError, match=f"^{output} cannot be written: found .*Is a directory"),
        new_folder(output, size_bytes=1, remedy="Make room.") as folder,
    ):
        folder.write_text("text")
    assert not output.exists()
