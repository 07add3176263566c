"""A safetensors file written and read a tensor at a time, with a checksum of each: nothing is held twice."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from minimax_tools.checkpoint.header import DTYPES, TensorEntry
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError

_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Write the tensors in the order of their names, and see that they are on the disk.

    Returns:
        The crc32 of each tensor's bytes, by name.

    Raises:
        OSError: The disk is full, or cannot be written to.
        ValueError: A tensor has a dtype that safetensors does not know.
    """
    names = sorted(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors does not know")
        end = position + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    checksums = {}
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            view = _bytes(tensors[name].detach().to("cpu").contiguous())
            file.write(view)
            checksums[name] = zlib.crc32(view)
        file.flush()
        os.fsync(file.fileno())
    return checksums


def read_tensor(
    reader: CheckpointReader, entry: TensorEntry, *, crc32: int, device: torch.device
) -> torch.Tensor:
    """The tensor on `device`, in its stored dtype.

    Raises:
        CheckpointError: It cannot be read, or its bytes are not those that were written.
    """
    tensor = reader.read(entry.name)
    found = zlib.crc32(_bytes(tensor))
    if found != crc32:
        raise CheckpointError(
            f"{entry.name} in {entry.file} is damaged",
            expected=f"crc32 {crc32:08x}",
            found=f"{found:08x}",
            next_step="Copy the folder again, or save the component anew.",
        )
    return tensor.to(device)


def _bytes(tensor: torch.Tensor) -> memoryview:
    view: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return view
