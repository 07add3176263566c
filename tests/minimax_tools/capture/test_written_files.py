"""A run ends well only if its files are there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.writer import CaptureWriter, WrittenFiles, open_capture
from minimax_tools.errors import CaptureError
from minimax_tools.model.inputs import Inputs

Write = Callable[..., None]


@pytest.fixture
def write(describe: Callable[..., Description], inputs: Inputs, layer_of: Any) -> Write:
    """Writes a capture of three layers, calling `disturb` before it is finished, and `afterwards` behind that."""

    def write(directory: Path, *, disturb: Any = None, afterwards: Any = None) -> None:
        with open_capture(directory, describe(), inputs=inputs) as writer:
            for layer in range(3):
                if layer not in writer.complete_layers:
                    writer.write_layer(layer, layer_of(layer))
            writer.write_json("extra.json", {"a": 1})
            if disturb:
                disturb(directory)
            writer.finish()
            if afterwards:
                afterwards(directory)

    return write


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def alter(name: str) -> Callable[[Path], None]:
    """Changes the last byte of a file, which keeps its size."""

    def change(directory: Path) -> None:
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    return change


@pytest.mark.parametrize(
    "name",
    ["layer_0.safetensors", "layer_2.safetensors", "inputs.safetensors", "extra.json", "manifest.json"],
)
def test_file_that_was_removed_fails_the_run(write: Write, tmp_path: Path, name: str) -> None:
    with pytest.raises(
        CaptureError, match=rf"were removed or changed while .*found {name} is missing"
    ) as caught:
        write(tmp_path / "run", disturb=remove(name))
    is_known = name != "manifest.json"
    assert str(caught.value).endswith("again." if is_known else "again, with another --output-dir.")
    # That mends it.
    again = tmp_path / ("run" if is_known else "other")
    write(again)
    assert Capture.open(again).is_complete


@pytest.mark.parametrize("name", ["layer_1.safetensors", "extra.json", "manifest.json"])
def test_file_that_was_changed_fails_the_run(write: Write, tmp_path: Path, name: str) -> None:
    with pytest.raises(CaptureError, match="were removed or changed"):
        write(tmp_path, disturb=alter(name))


def test_file_that_was_removed_after_the_finish_fails_the_run(write: Write, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"found layer_1\.safetensors is missing"):
        write(tmp_path, afterwards=remove("layer_1.safetensors"))


def test_folder_that_was_copied_back_is_as_good(write: Write, tmp_path: Path) -> None:
    def copy_back(directory: Path) -> None:
        shutil.copytree(directory, tmp_path / "copy")
        shutil.rmtree(directory)
        shutil.copytree(tmp_path / "copy", directory)

    write(tmp_path / "run", disturb=copy_back)
    assert Capture.open(tmp_path / "run").is_complete


def test_stored_layer_that_a_resumed_run_lost_fails_it(
    write: Write, describe: Any, inputs: Inputs, layer_of: Any, tmp_path: Path
) -> None:
    with open_capture(tmp_path, describe(), inputs=inputs) as writer:
        writer.write_layer(0, layer_of(0))
    with pytest.raises(CaptureError, match=r"layer_0\.safetensors is missing"):
        write(tmp_path, disturb=remove("layer_0.safetensors"))


class TestFilesOfOtherRanks:
    """Files that only the manifest tells of."""

    @pytest.fixture
    def writer(self, write: Write, tmp_path: Path) -> CaptureWriter:
        write(tmp_path)
        return CaptureWriter(tmp_path, Capture.open(tmp_path).manifest)

    def require(self, writer: CaptureWriter) -> None:
        WrittenFiles(writer.directory).require(writer.manifest, manifest_name="manifest.json", patience_s=0.3)

    def test_are_looked_for(self, writer: CaptureWriter) -> None:
        self.require(writer)
        (writer.directory / "layer_1.safetensors").unlink()
        with pytest.raises(CaptureError, match=r"layer_1\.safetensors is missing"):
            self.require(writer)

    def test_must_have_the_size_of_their_header(self, writer: CaptureWriter) -> None:
        path = writer.directory / "layer_1.safetensors"
        safetensors.torch.save_file({"output": torch.ones(4)}, path)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CaptureError, match=r"layer_1\.safetensors is damaged"):
            self.require(writer)


def test_capture_that_lacks_a_file_is_not_marked_complete(write: Write, tmp_path: Path) -> None:
    with pytest.raises(CaptureError):
        write(tmp_path, disturb=remove("layer_1.safetensors"))
    assert not Capture.open(tmp_path).is_complete
