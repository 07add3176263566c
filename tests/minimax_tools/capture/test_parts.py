from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.parts import part_name, read_shared, refuse_other_owner, require_shared
from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.folder_lock import LOCK_NAME, locked_directory, read_owner
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site


def write_together(directory: Path, describe: Any, inputs: Inputs, layer_of: Any) -> list[Manifest]:
    """Two ranks write, the second one layers 1 and 2; what each listed."""
    with open_capture(directory, describe(), inputs=inputs) as first:
        second = CaptureWriter(directory, first.manifest, manifest_name=part_name(1))
        for writer, layers in ((first, (0,)), (second, (1, 2))):
            for layer in layers:
                writer.write_layer(layer, layer_of(layer))
        return [first.manifest, second.manifest]


def test_parts_that_are_told_make_the_capture_of_one_process(
    tmp_path: Path, describe: Any, inputs: Inputs, layer_of: Any
) -> None:
    with open_capture(tmp_path / "one", describe(), inputs=inputs) as writer:
        for layer in range(3):
            writer.write_layer(layer, layer_of(layer))
        writer.finish()
    own, other = write_together(tmp_path / "two", describe, inputs, layer_of)
    # What the ranks tell is enough: the part's file need not be seen.
    (tmp_path / "two" / part_name(1)).unlink()
    writer = CaptureWriter(tmp_path / "two", own)
    writer.add_part(decode(Manifest, encode(other)))
    writer.finish()
    assert (tmp_path / "two/manifest.json").read_bytes() == (tmp_path / "one/manifest.json").read_bytes()


def test_run_that_resumes_takes_parts_up_and_removes_them(
    tmp_path: Path, describe: Any, inputs: Inputs, layer_of: Any
) -> None:
    write_together(tmp_path, describe, inputs, layer_of)
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        assert writer.complete_layers == (0, 1, 2)
        assert not (tmp_path / part_name(1)).exists()
    assert Capture.open(tmp_path).layers == (0, 1, 2)


@pytest.mark.parametrize("damage", ["{", "[]", None])
def test_part_that_is_damaged_or_of_another_capture_does_not_count(
    tmp_path: Path, describe: Any, inputs: Inputs, layer_of: Any, damage: str | None
) -> None:
    write_together(tmp_path, describe, inputs, layer_of)
    part = tmp_path / part_name(1)
    text = part.read_text()
    part.write_text(text.replace('"builtin"', '"other"') if damage is None else damage)
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        assert writer.complete_layers == (0,)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_records_stay_with_the_layers_that_they_are_of(
    tmp_path: Path, describe: Any, inputs: Inputs, layer_of: Any, is_resumed: bool
) -> None:
    write_together(tmp_path, describe, inputs, layer_of)
    record = ReadRecord.begun("a", plan="p").write(tmp_path / RECORDS_FOLDER)
    with open_capture(tmp_path, describe(target="builtin" if is_resumed else "other"), inputs=inputs):
        assert record.exists() == is_resumed


def test_lock_says_whose_it_is_and_a_second_run_does_not_change_that(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("a longer name, that a killed run left")
    with locked_directory(tmp_path, owner="first"):
        with pytest.raises(CaptureError), locked_directory(tmp_path, owner="second"):
            pass
        assert read_owner(tmp_path) == "first"
    assert read_owner(tmp_path) is None


def test_directory_that_shows_late_is_waited_for(tmp_path: Path) -> None:
    late = threading.Timer(0.3, (tmp_path / LOCK_NAME).write_text, ["mine"])
    late.start()
    require_shared(tmp_path, "mine", patience_s=10)
    late.join()


@pytest.mark.parametrize(
    ("left", "found"), [(None, "none"), ("", "that of another"), ("x", "that of another")]
)
def test_directory_of_another_run_is_refused(tmp_path: Path, left: str | None, found: str) -> None:
    if left is not None:
        (tmp_path / LOCK_NAME).write_text(left)
    with pytest.raises(CaptureError, match=f"is not the directory that rank 0 opened: .*, found {found}\\."):
        require_shared(tmp_path, "mine", patience_s=0)


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
