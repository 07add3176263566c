"""Digests of stored tensors: sha256 over their bytes in row-major order."""

from __future__ import annotations

import hashlib

import torch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.torch_files.header import PickledEntry

_BUFFER_BYTES = 1 << 20


def digest_tensor(reader: CheckpointReader, entry: TensorEntry) -> str:
    """Compute the sha256 of a tensor, which is equal for a safetensors and a `.bin` copy.

    A `.bin` tensor is loaded whole, a safetensors one in small pieces.

    Raises:
        CheckpointError: The tensor cannot be read.
    """
    digest = hashlib.sha256()
    if isinstance(entry, PickledEntry):
        digest.update(tensor_bytes(reader.read(entry.name)))
        return digest.hexdigest()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    remaining = entry.size_bytes
    try:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            while remaining and (count := file.readinto(buffer[: min(remaining, _BUFFER_BYTES)])):
                digest.update(buffer[:count])
                remaining -= count
    except OSError as error:
        raise _unreadable(entry, str(error)) from error
    if remaining:
        raise _unreadable(entry, f"an end of the file {remaining} bytes too early")
    return digest.hexdigest()


def describe_shape(entry: TensorEntry) -> str:
    """Return dtype and shape, which a digest of the bytes does not cover, such as `torch.bfloat16 [64, 32]`."""
    return f"{entry.dtype} {list(entry.shape)}"


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a CPU tensor's bytes as they lie in a file."""
    content: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return content


def _unreadable(entry: TensorEntry, found: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.name} cannot be read from {entry.file}", found=found, next_step="Fetch the file again."
    )
