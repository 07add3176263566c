from __future__ import annotations

import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch

from minimax_tools.errors import CaptureError
from minimax_tools.machine.files import is_temporary, whole_capture_file


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fail_halfway(path: Path) -> None:
    with whole_capture_file(path) as temporary:
        temporary.write_text("half")
        raise OSError("planted")


def test_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text("old")
    with whole_capture_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert is_temporary(temporary.parent)
    assert path.read_text() == "new"
    assert names(tmp_path) == ["manifest.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text("old")
    with pytest.raises(CaptureError, match=r"cannot write .*manifest\.json: found planted"):
        fail_halfway(path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        safetensors.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
)
def test_full_disk_is_told_apart_with_the_free_space(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(
        CaptureError, match=rf"no space left to write {tmp_path}/a\.json: found [\d.]+ MB free"
    ):
        with whole_capture_file(tmp_path / "a.json"):
            raise error


def test_others_may_read_what_safetensors_wrote(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    with whole_capture_file(tmp_path / "a.safetensors") as temporary:
        safetensors.torch.save_file({"x": torch.ones(2)}, temporary)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
