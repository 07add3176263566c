"""Tensors of a saved component (a model's bottom, trunk or top): one safetensors file, a checksum of each tensor."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.header import TensorEntry, encode_header
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.stored_dtype import SAFETENSORS_NAMES


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write tensors in the order of their names, and flush them to the disk.

    Returns:
        The crc32 of each tensor's bytes, by name.

    Raises:
        OSError: The disk is full, or cannot be written to.
        ValueError: A tensor has a dtype that safetensors does not know.
    """
    sizes = [TensorSize.of(name, tensor) for name, tensor in sorted(tensors.items())]
    for size in sizes:
        if size.dtype not in SAFETENSORS_NAMES:
            raise ValueError(f"{size.name} is {size.dtype}, which safetensors does not know")
    checksums = {}
    with path.open("wb") as file:
        file.write(encode_header(sizes))
        for name, tensor in sorted(tensors.items()):
            data = _bytes_of(tensor.detach().to("cpu").contiguous())
            file.write(data)
            checksums[name] = zlib.crc32(data)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def read_tensor(
    reader: CheckpointReader, entry: TensorEntry, *, crc32: int, device: torch.device
) -> torch.Tensor:
    """Read a tensor to `device`, in its stored dtype.

    Raises:
        CheckpointError: The tensor cannot be read, or its bytes have another checksum.
    """
    tensor = reader.read(entry.name)
    found = zlib.crc32(_bytes_of(tensor))
    if found != crc32:
        raise CheckpointError(
            f"{entry.name} in {entry.file} is damaged",
            expected=f"crc32 {crc32:08x}",
            found=f"{found:08x}",
            next_step="Copy the folder again, or save the component anew.",
        )
    return tensor.to(device)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view
