"""Digests: what a manifest says of the tensors that are no site's value (inputs, float32 twins, noise floors).

A site's value has its digest in its entry. With these, every tensor of a capture has one, and so has every JSON file
that is stored beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from minimax_tools.json_codec import decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """Dtype, shape, and sha256 over the bytes in row-major order, of one stored tensor."""

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
        """Digests by name, in whatever order."""
        return cls(file=file, tensors=tuple(sorted(tensors.items())))

    def to_json(self) -> dict[str, Any]:
        """Return the digests by name, as a manifest holds them."""
        return {name: encode(digest) for name, digest in self.tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Digests of everything that a capture stores and no entry describes.

    Args:
        tensors: Of the tensor files, sorted by name.
        texts: Name of each JSON file and sha256 over its bytes, sorted by name.
    """

    tensors: tuple[FileDigests, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()

    def with_files(self, files: Iterable[FileDigests]) -> Digests:
        """These with the digests of some files added, or replaced."""
        known = {one.file: one for one in self.tensors} | {one.file: one for one in files}
        return replace(self, tensors=tuple(known[name] for name in sorted(known)))

    def with_text(self, name: str, sha256: str) -> Digests:
        """These with the digest of a JSON file added, or replaced."""
        return replace(self, texts=tuple(sorted({**dict(self.texts), name: sha256}.items())))

    def of_group(self, group: str) -> tuple[FileDigests, ...]:
        """Digests of the files of a layer (`layer_7`) or of the sites outside the layers (`model`)."""
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
