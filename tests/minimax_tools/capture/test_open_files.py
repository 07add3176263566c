"""Safetensors files that are read tensor by tensor, small ones whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minimax_tools.capture.proof import OpenFiles

# Elements of a float32 tensor whose file is read whole, and of one that is mapped.
SIZES = {"small": 8, "large": 2**21}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_tensor_belongs_to_its_reader_alone(tmp_path: Path, size: int) -> None:
    save_file({"ones": torch.ones(size), "twos": torch.full((size,), 2.0)}, tmp_path / "file.safetensors")
    files = OpenFiles(tmp_path)
    first = files.read("file.safetensors", "ones")
    assert first is not None
    first.zero_()
    again = files.read("file.safetensors", "ones")
    assert again is not None
    assert torch.equal(again, torch.ones(size))
    assert files.read("file.safetensors", "threes") is None


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path, size: int) -> None:
    files = OpenFiles(tmp_path)
    states = set()
    for value in (1.0, 2.0):
        save_file({"values": torch.full((size,), value)}, tmp_path / "new.safetensors")
        (tmp_path / "new.safetensors").replace(tmp_path / "file.safetensors")
        read = files.read("file.safetensors", "values")
        assert read is not None
        assert torch.equal(read, torch.full((size,), value))
        states.add(files.state("file.safetensors"))
    assert len(states) == 2


def test_a_small_file_may_hold_scales_of_powers_of_two(tmp_path: Path) -> None:
    scales = torch.tensor([127, 128], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file({"scales": scales}, tmp_path / "file.safetensors")
    read = OpenFiles(tmp_path).read("file.safetensors", "scales")
    assert read is not None
    assert torch.equal(read.float(), torch.tensor([1.0, 2.0]))
