"""Dumps that cannot be read whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from minimax_tools.dumps.opening import refuse_unreadable
from minimax_tools.errors import CaptureError


def test_whole_dump_is_read_links_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.pt").write_bytes(b"")
    (tmp_path / "a" / "y.pt").symlink_to("x.pt")
    (tmp_path / "again").symlink_to(".")
    refuse_unreadable(tmp_path)


def test_everything_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.pt").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "module").symlink_to("nowhere")
    (tmp_path / "c.safetensors").symlink_to("c.safetensors")
    with pytest.raises(CaptureError) as caught:
        refuse_unreadable(tmp_path)
    for words in ("a.pt: a folder", "b/module (a link to nowhere): No such file", "c.safetensors (a link to"):
        assert words in str(caught.value)


@pytest.fixture
def dump_of_another_user() -> Iterator[Path]:
    """A folder in which this process may not read everything; as root it goes on as nobody."""
    nobody, was_root = 65534, os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "denied").mkdir(mode=0)
        (Path(folder) / "x.pt").touch(mode=0)
        if was_root:
            os.seteuid(nobody)
        try:
            yield Path(folder)
        finally:
            if was_root:
                os.seteuid(0)
            (Path(folder) / "denied").chmod(0o700)


def test_folder_and_file_without_access_are_named(dump_of_another_user: Path) -> None:
    with pytest.raises(CaptureError, match=r"denied: Permission denied.*x\.pt: Permission denied"):
        refuse_unreadable(dump_of_another_user)
