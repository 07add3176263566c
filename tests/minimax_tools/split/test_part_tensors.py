from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.split.part_folder import read_tensor, write_tensors

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.bfloat16).view(3, 4).T,
    "codes": torch.arange(16).to(torch.float8_e4m3fn),
    "number": torch.tensor(3.5),
    "nothing": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
    "large": torch.tensor([2**60]),
}


def test_file_is_one_that_safetensors_reads(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", TENSORS)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(
            found[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        )


def test_checksums_are_those_of_the_bytes(tmp_path: Path) -> None:
    checksums = write_tensors(tmp_path / "model.safetensors", TENSORS)
    assert checksums["number"] == zlib.crc32(TENSORS["number"].numpy().tobytes())
    with CheckpointReader(tmp_path) as reader:
        for name, tensor in TENSORS.items():
            read = read_tensor(reader, reader.index[name], crc32=checksums[name], device=torch.device("cpu"))
            assert torch.equal(read.float(), tensor.float())


def test_other_bytes_are_noticed(tmp_path: Path) -> None:
    checksums = write_tensors(tmp_path / "model.safetensors", TENSORS)
    with CheckpointReader(tmp_path) as reader:
        with pytest.raises(CheckpointError, match="matrix in .* is damaged"):
            read_tensor(
                reader, reader.index["matrix"], crc32=checksums["matrix"] ^ 1, device=torch.device("cpu")
            )


def test_dtype_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wave is torch.complex64"):
        write_tensors(tmp_path / "model.safetensors", {"wave": torch.zeros(1, dtype=torch.complex64)})
