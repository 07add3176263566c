from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.writer import (
    CaptureWriter,
    open_capture,
    read_shared,
    refuse_other_owner,
    wait_for_lock,
)
from minimax_tools.errors import CaptureError
from minimax_tools.machine.files import LOCK_NAME, locked_directory
from minimax_tools.model.sites import Site


def test_directory_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    late = threading.Timer(0.3, (tmp_path / LOCK_NAME).write_text, ["mine"])
    late.start()
    wait_for_lock(tmp_path, "mine", patience_s=10)
    late.join()


@pytest.mark.parametrize(
    ("left", "found"), [(None, "none"), ("", "that of another"), ("x", "that of another")]
)
def test_directory_of_another_run_is_refused(tmp_path: Path, left: str | None, found: str) -> None:
    if left is not None:
        (tmp_path / LOCK_NAME).write_text(left)
    with pytest.raises(CaptureError, match=f"is not the directory that rank 0 opened: .*, found {found}\\."):
        wait_for_lock(tmp_path, "mine", patience_s=0)


def test_rank_that_outlived_its_run_writes_nothing_into_the_next(tmp_path: Path) -> None:
    refuse_other_owner(tmp_path, "mine")
    with locked_directory(tmp_path, owner="mine"):
        refuse_other_owner(tmp_path, "mine")
    with locked_directory(tmp_path, owner="next"), pytest.raises(CaptureError, match="another run writes in"):
        refuse_other_owner(tmp_path, "mine")


@pytest.fixture
def writer(tmp_path: Path, describe: Any, inputs: Any, layer_of: Any) -> CaptureWriter:
    """The writer of a capture that has one layer."""
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write_layer(0, layer_of(0))
    return writer


def test_tensor_that_shows_late_is_waited_for(writer: CaptureWriter, tmp_path: Path, layer_of: Any) -> None:
    file, away = tmp_path / "layer_0.safetensors", tmp_path / "away"
    file.rename(away)
    late = threading.Timer(0.3, away.rename, [file])
    late.start()
    entry = next(entry for entry in writer.manifest.entries if entry.site == Site.OUTPUT)
    found = read_shared(tmp_path, writer.manifest, entry, patience_s=10)
    late.join()
    assert torch.equal(found, layer_of(0)[Site.OUTPUT])


def test_file_of_another_run_is_not_taken_for_it(
    writer: CaptureWriter, tmp_path: Path, layer_of: Any
) -> None:
    entry = next(entry for entry in writer.manifest.entries if entry.site == Site.OUTPUT)
    writer.write_layer(1, layer_of(1))
    (tmp_path / "layer_1.safetensors").rename(tmp_path / "layer_0.safetensors")
    with pytest.raises(
        CaptureError,
        match="output of layer 0 does not show in .*: found .*output of layer 0 in layer_0.safetensors does not match",
    ):
        read_shared(tmp_path, writer.manifest, entry, patience_s=0)
