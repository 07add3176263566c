"""Digests: sha256 of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """Dtype, shape and sha256 of a stored tensor; the hash is over its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} of sha256 {self.sha256[:16]}…"


# Digests of the tensors of some files, by file and by tensor.
FileDigests = Mapping[str, Mapping[str, TensorDigest]]


def describe_tensor(tensor: torch.Tensor) -> TensorDigest:
    """Describe a CPU tensor by dtype, shape and sha256."""
    return TensorDigest(
        dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), sha256=digest_tensor(tensor)
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the sha256 over a CPU tensor's bytes in row-major order."""
    # numpy has no bfloat16, so the bytes are hashed as uint8.
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()
