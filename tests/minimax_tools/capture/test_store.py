from __future__ import annotations

import os
from pathlib import Path

from minimax_tools.capture.store import (
    DEVICE_SIDE,
    GOLDEN_SIDE,
    capture_directory,
    files_of_layers,
    list_captures,
    newest_capture,
    stored_layers,
)


def make(captures: Path, side: str, run: str, *, time_ns: int) -> Path:
    directory = capture_directory(captures, side, run)
    directory.mkdir(parents=True)
    (directory / "manifest.json").touch()
    os.utime(directory / "manifest.json", ns=(time_ns, time_ns))
    return directory


def test_newest_capture_of_a_side_is_found_by_its_manifest(tmp_path: Path) -> None:
    make(tmp_path, DEVICE_SIDE, "single_layer_0", time_ns=2)
    newest = make(tmp_path, DEVICE_SIDE, "sweep_0_to_3", time_ns=3)
    make(tmp_path, GOLDEN_SIDE, "full_model", time_ns=9)
    (tmp_path / "neuron/unfinished").mkdir()
    assert newest_capture(tmp_path, DEVICE_SIDE) == newest


def test_captures_of_several_folders_are_listed_once_newest_first(tmp_path: Path) -> None:
    old, new = (make(tmp_path, GOLDEN_SIDE, name, time_ns=time) for name, time in (("old", 1), ("new", 5)))
    between = make(tmp_path, DEVICE_SIDE, "sweep", time_ns=3)
    goldens, runs = tmp_path / GOLDEN_SIDE, tmp_path / DEVICE_SIDE
    assert list_captures(goldens, runs, goldens) == [new, between, old]
    assert list_captures(tmp_path / "gone") == []


def test_files_of_layers_are_named_in_their_order(tmp_path: Path) -> None:
    for layer in (10, 2, 9):
        (tmp_path / f"layer_{layer}.safetensors").write_bytes(bytes(100))
        (tmp_path / f"layer_{layer}.floor.safetensors").write_bytes(bytes(10))
    (tmp_path / "layer_x.safetensors").write_bytes(bytes(1))
    layers = stored_layers(tmp_path)
    assert layers == (2, 9, 10)
    assert stored_layers(tmp_path / "none") == ()
    of_two = [
        "layer_2.safetensors",
        "layer_2.floor.safetensors",
        "layer_9.safetensors",
        "layer_9.floor.safetensors",
    ]
    # The layer that exceeds the bytes is the last.
    for most_bytes, names in ((109, of_two[:2]), (219, of_two), (110, of_two)):
        found = files_of_layers(tmp_path, layers, most_bytes=most_bytes)
        assert [path.name for path in found] == names
    assert files_of_layers(tmp_path, (3,), most_bytes=9) == ()
