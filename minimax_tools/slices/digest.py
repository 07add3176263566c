"""Digests of stored tensors: sha256 over their bytes in row-major order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError

_BUFFER_BYTES = 1 << 20


def digest_tensors(entries: Sequence[TensorEntry], index: TensorIndex) -> Iterator[tuple[str, str]]:
    """Yield name and sha256 of tensors of an index, in turn; it is equal for a safetensors and a `.bin` copy.

    A `.bin` tensor is loaded whole, a safetensors one in small pieces.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    if any(entry.is_pickled for entry in entries):
        # This import needs torch, which safetensors files do not.
        from minimax_tools.slices.torch_values import read_values

        for name, content in read_values(index, [entry.name for entry in entries]):
            yield name, hashlib.sha256(content).hexdigest()
    else:
        for entry in entries:
            yield entry.name, _digest_range(entry)


def _digest_range(entry: TensorEntry) -> str:
    digest = hashlib.sha256()
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


def _unreadable(entry: TensorEntry, found: str) -> CheckpointError:
    return CheckpointError(
        f"{entry.name} cannot be read from {entry.file}", found=found, next_step="Fetch the file again."
    )
