"""Dumps that cannot be read whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minimax_tools.dumps.readable import refuse_unreadable
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


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is denied to root")
def test_folder_and_file_without_access_are_named(tmp_path: Path) -> None:
    (tmp_path / "denied").mkdir(mode=0)
    (tmp_path / "x.pt").touch(mode=0)
    with pytest.raises(CaptureError, match=r"denied: Permission denied.*x\.pt: Permission denied"):
        refuse_unreadable(tmp_path)
