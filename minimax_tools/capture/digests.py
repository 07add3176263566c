"""Digests: the digests of inputs, float32 twins, noise floors and JSON files in a manifest.

The value of a site has its digest in its entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from minimax_tools.json_codec import decode, encode


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
    """Digests of all tensors of one file.

    Args:
        tensors: Name and digest of each, sorted by name.
    """

    file: str
    tensors: tuple[tuple[str, TensorDigest], ...]

    @classmethod
    def of(cls, file: str, tensors: Mapping[str, TensorDigest]) -> FileDigests:
        """Build from digests by name, in any order."""
        return cls(file=file, tensors=tuple(sorted(tensors.items())))

    def to_json(self) -> dict[str, Any]:
        """Return the digests by name, as a manifest holds them."""
        return {name: encode(digest) for name, digest in self.tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Digests of everything stored that has no entry.

    Args:
        tensors: Digests of the tensor files, sorted by name.
        texts: Name of each JSON file and sha256 over its bytes, sorted by name.
    """

    tensors: tuple[FileDigests, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()

    def with_files(self, files: Iterable[FileDigests]) -> Digests:
        """Add or replace the digests of some files."""
        known = {one.file: one for one in self.tensors} | {one.file: one for one in files}
        return replace(self, tensors=tuple(known[name] for name in sorted(known)))

    def with_text(self, name: str, sha256: str) -> Digests:
        """Add or replace the digest of a JSON file."""
        return replace(self, texts=tuple(sorted({**dict(self.texts), name: sha256}.items())))

    def of_group(self, group: str) -> tuple[FileDigests, ...]:
        """Return the digests of the files of a layer (`layer_7`), or of the sites outside the layers (`model`)."""
        return tuple(one for one in self.tensors if one.file.startswith(f"{group}."))

    def to_json(self) -> dict[str, Any]:
        """Return the digests of tensors by file and name, as a manifest holds them."""
        return {one.file: encode(one) for one in self.tensors}

    @classmethod
    def decode(cls, tensors: Any, texts: Any) -> Digests:
        """Return the digests of a manifest: of tensors by file and name, and of JSON files by name.

        Raises:
            DecodeError: They are of another form.
        """
        files = decode(dict[str, dict[str, TensorDigest]], tensors)
        return cls(
            tensors=tuple(FileDigests.of(file, files[file]) for file in sorted(files)),
            texts=tuple(sorted(decode(dict[str, str], texts).items())),
        )
