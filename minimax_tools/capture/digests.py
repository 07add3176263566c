"""Digests: sha256 of tensors, and those that a manifest lists of everything but the sites.

A manifest lists the digests of inputs, float32 twins, noise floors and JSON files here; a site's is in its `Entry`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from minimax_tools.errors import shorten
from minimax_tools.json_codec import decode, encode
from minimax_tools.machine.files import is_plain_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """Dtype, shape and sha256 of a stored tensor; the hash is over its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} of sha256 {self.sha256[:16]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigests:
    """Digests of all tensors of one file."""

    file: str
    tensors: tuple[tuple[str, TensorDigest], ...]  # name and digest of each tensor, sorted by name

    def __post_init__(self) -> None:
        require_plain_name(self.file)

    @classmethod
    def of(cls, file: str, tensors: Mapping[str, TensorDigest]) -> FileDigests:
        """Build from digests by name, in any order."""
        return cls(file=file, tensors=tuple(sorted(tensors.items())))

    def to_json(self) -> dict[str, Any]:
        """Return the digests by name, as a manifest holds them."""
        return {name: encode(digest) for name, digest in self.tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Digests of everything stored that has no entry."""

    tensors: tuple[FileDigests, ...] = ()  # one for each tensor file, sorted by file name
    texts: tuple[tuple[str, str], ...] = ()  # name of each JSON file and sha256 of its bytes, sorted by name

    def __post_init__(self) -> None:
        for name, _ in self.texts:
            require_plain_name(name)

    def with_files(self, files: Iterable[FileDigests]) -> Digests:
        """Add or replace the digests of some tensor files."""
        by_name = {listed.file: listed for listed in (*self.tensors, *files)}
        return replace(self, tensors=tuple(by_name[name] for name in sorted(by_name)))

    def with_text(self, name: str, sha256: str) -> Digests:
        """Add or replace the digest of a JSON file."""
        return replace(self, texts=tuple(sorted({**dict(self.texts), name: sha256}.items())))

    def of_group(self, group: str) -> tuple[FileDigests, ...]:
        """Return the digests of the files of a layer (`layer_7`), or of the sites outside the layers (`model`)."""
        return tuple(listed for listed in self.tensors if listed.file.startswith(f"{group}."))

    def to_json(self) -> dict[str, Any]:
        """Return the digests of tensors by file and name; a manifest holds those of JSON files under another key."""
        return {listed.file: encode(listed) for listed in self.tensors}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Digests:
        """Return the digests of a manifest: `tensors` by file and name, and `texts`, JSON files, by name."""
        files = decode(dict[str, dict[str, TensorDigest]], record["tensors"])
        return cls(
            tensors=tuple(FileDigests.of(file, files[file]) for file in sorted(files)),
            texts=tuple(sorted(decode(dict[str, str], record["texts"]).items())),
        )


def require_plain_name(name: str) -> None:
    """Raise unless a name is that of a file in the capture's own folder: a manifest may come from anywhere.

    Raises:
        ValueError: It leads elsewhere, or is hidden.
    """
    if not is_plain_name(name) or name.startswith(".") or "\\" in name:
        raise ValueError(f"{shorten(name)!r} is no file of a capture's folder")


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
