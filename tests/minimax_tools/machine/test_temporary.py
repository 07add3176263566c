"""The next writer removes what a killed one left; files of a living writer stay."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minimax_tools.errors import CheckpointError
from minimax_tools.machine.files import (
    is_temporary,
    new_folder,
    remove_abandoned,
    temporary_beside,
    whole_capture_file,
    whole_file,
)

Write = Callable[[Path], object]


def write_text(path: Path) -> None:
    with whole_file(path) as file:
        file.write("whole")


def write_tensors(path: Path) -> None:
    with whole_capture_file(path) as temporary:
        save_file({"x": torch.ones(2)}, temporary)


def write_folder(path: Path) -> None:
    with new_folder(path, size_bytes=1, remedy="Make room.") as folder:
        (folder / "file").write_text("whole")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill_while_writing(path: Path) -> Path:
    """Kill a process that is writing `path`, and return what it leaves."""
    process = os.fork()
    if process == 0:
        with temporary_beside(path) as written:
            written.write_text("half")
            # As safetensors does.
            (written.parent / ".tmpAb3xYz").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    (left,) = (one for one in path.parent.iterdir() if is_temporary(one))
    assert set(names(left)) == {".lock", f".{path.name}.tmp", ".tmpAb3xYz"}
    return left


@pytest.mark.parametrize("write", [write_text, write_tensors, write_folder])
def test_next_writer_of_the_name_removes_what_a_killed_one_left(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "a[1].json"
    kill_while_writing(path)
    write(path)
    assert names(tmp_path) == ["a[1].json"]


@pytest.mark.parametrize("write", [write_text, write_tensors, write_folder])
def test_two_writers_of_a_name_never_mix(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "name"
    with temporary_beside(path) as written:
        written.write_text("of the first writer")
        write(path)
        remove_abandoned(tmp_path)
        assert written.read_text() == "of the first writer"
    assert names(tmp_path) == ["name"]


def test_other_names_are_left_to_their_own_writers(tmp_path: Path) -> None:
    left = kill_while_writing(tmp_path / "name")
    write_text(tmp_path / "other")
    assert left.exists()
    remove_abandoned(tmp_path)
    assert names(tmp_path) == ["other"]


def test_writer_that_was_killed_before_its_lock_is_known(tmp_path: Path) -> None:
    (tmp_path / ".name.0123abcd.tmp").mkdir()
    write_text(tmp_path / "name")
    assert names(tmp_path) == ["name"]


def test_what_is_being_written_is_found_by_no_search_for_files(tmp_path: Path) -> None:
    with temporary_beside(tmp_path / "a.safetensors") as written:
        written.write_text("half")
        (tmp_path / "b.safetensors").touch()
        assert [path.name for path in tmp_path.rglob("*.safetensors") if path.is_file()] == ["b.safetensors"]


def test_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError), new_folder(tmp_path / "new", size_bytes=1, remedy="Make room."):
        raise OSError("planted")
    assert names(tmp_path) == []
