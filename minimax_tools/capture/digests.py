"""Digests: the digests of inputs, float32 twins, noise floors and JSON files in a manifest.

The value of a site has its digest in its entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


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
        file: The file's name.
        tensors: Name and digest of each, sorted by name.
    """

    file: str
    tensors: tuple[tuple[str, TensorDigest], ...]

    @classmethod
    def of(cls, file: str, tensors: Mapping[str, TensorDigest]) -> FileDigests:
        """Build from digests by name, in any order."""
        return cls(file=file, tensors=tuple(sorted(tensors.items())))

    def as_json(self) -> dict[str, Any]:
        """Return the digests by name, as a manifest stores them."""
        return {name: asdict(digest) for name, digest in self.tensors}

    @classmethod
    def from_json(cls, file: str, record: Mapping[str, Mapping[str, Any]]) -> FileDigests:
        """Read digests from a manifest."""
        tensors = {
            name: TensorDigest(
                dtype=str(one["dtype"]),
                shape=tuple(int(size) for size in one["shape"]),
                sha256=str(one["sha256"]),
            )
            for name, one in record.items()
        }
        return cls.of(file, tensors)


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

    @classmethod
    def from_json(
        cls, tensors: Mapping[str, Mapping[str, Mapping[str, Any]]], texts: Mapping[str, str]
    ) -> Digests:
        """Read from a manifest the digests by file and tensor, and those of JSON files by name."""
        files = (FileDigests.from_json(file, record) for file, record in tensors.items())
        return cls(
            tensors=tuple(sorted(files, key=lambda one: one.file)),
            texts=tuple(sorted((name, str(sha256)) for name, sha256 in texts.items())),
        )
