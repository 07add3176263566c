from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.resumption import part_name
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.json_codec import decode, encode
from minimax_tools.model.inputs import Inputs


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
