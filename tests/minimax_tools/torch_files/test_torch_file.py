from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minimax_tools.errors import CaptureError, CheckpointError, Mm2Error
from minimax_tools.torch_files.stored import StoredTensor
from minimax_tools.torch_files.torch_file import read_structure, read_value, refusing

LAYOUTS = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "stream"])


def save(value: object, path: Path, *, is_zip: bool) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    return path


@LAYOUTS
def test_structure_says_where_each_tensor_lies(is_zip: bool, tmp_path: Path) -> None:
    base = torch.arange(12, dtype=torch.int32).view(3, 4)
    value = {"step": 3, "base": base, "column": base[:, 1], "other": torch.ones(2)}
    path = save(value, tmp_path / "saved.pt", is_zip=is_zip)
    found = read_structure(path)
    assert list(found) == list(value)
    assert found["step"] == 3
    content = path.read_bytes()
    for name in ("base", "column", "other"):
        stored, tensor = found[name], value[name]
        assert isinstance(stored, StoredTensor)
        extent = bytearray(content[stored.offset : stored.offset + stored.extent_bytes])
        assert torch.equal(stored.view(torch.frombuffer(extent, dtype=torch.uint8)), tensor)
    assert found["base"].storage == found["column"].storage
    assert found["base"].storage.offset != found["other"].storage.offset


@LAYOUTS
def test_value_and_structure_have_one_shape(is_zip: bool, tmp_path: Path) -> None:
    path = save([torch.ones(2, 3), {"x": torch.zeros(0)}], tmp_path / "saved.pt", is_zip=is_zip)
    value, structure = read_value(path), read_structure(path)
    assert structure[0].shape == value[0].shape == (2, 3)
    assert structure[1]["x"].shape == value[1]["x"].shape == (0,)


@pytest.mark.parametrize("error_type", [CaptureError, CheckpointError])
def test_fault_becomes_the_error_of_who_reads(error_type: type[CaptureError], tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    path.write_bytes(b"text")
    with pytest.raises(error_type, match=r"saved\.pt is damaged.*Do this"):
        with refusing(path, error_type, next_step="Do this."):
            read_structure(path)
    with pytest.raises(error_type, match=r"cannot read .*gone\.pt"):
        with refusing(tmp_path / "gone.pt", error_type, next_step="Do this."):
            read_value(tmp_path / "gone.pt")


def test_error_of_our_own_passes_through(tmp_path: Path) -> None:
    with pytest.raises(Mm2Error, match="^mine$"):
        with refusing(tmp_path, CheckpointError, next_step="Do this."):
            raise Mm2Error("mine")
