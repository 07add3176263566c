"""RemoteAddress: a folder that is not on this machine: `s3://bucket/folder`, or `hf://datasets/owner/name@revision`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from minimax_tools.errors import UsageError, shorten
from minimax_tools.text_enum import TextEnum

# With fewer slashes than two it is a slip, or came through pathlib.
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://|(?:s3|hf):", re.IGNORECASE)
_BUCKET = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]+)(?:/(.*))?")
# Owner and name, a revision, and a folder in the dataset.
_DATASET = re.compile(r"hf://datasets/([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\w[\w.-]*))?(?:/(.*))?")
_EXPECTED = "s3://bucket/folder or hf://datasets/owner/name@revision"
DEFAULT_REVISION = "main"


class Scheme(TextEnum):
    """The kinds of remote folders."""

    S3 = "s3"  # a bucket of S3, or of a server that speaks its protocol
    DATASET = "hf"  # a dataset of a Hugging Face hub


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAddress:
    """The address of a folder in a bucket or a dataset."""

    scheme: Scheme
    repository: str  # the bucket, or `owner/name` of the dataset
    path: str = ""  # the folder in it, without slashes at its ends; empty for all of it
    revision: str = ""  # branch, tag or commit of the dataset; empty for a bucket

    def __str__(self) -> str:
        folder = f"/{self.path}" if self.path else ""
        if self.scheme is Scheme.S3:
            return f"s3://{self.repository}{folder}"
        return f"hf://datasets/{self.repository}@{self.revision}{folder}"

    @classmethod
    def parse(cls, text: str) -> RemoteAddress:
        """Read an address; a dataset without a revision is that of `main`.

        Raises:
            UsageError: `text` is no such address.
        """
        if match := _BUCKET.fullmatch(text):
            return cls(scheme=Scheme.S3, repository=match[1], path=_clean(match[2], text))
        if match := _DATASET.fullmatch(text):
            return cls(
                scheme=Scheme.DATASET,
                repository=match[1],
                path=_clean(match[3], text),
                revision=match[2] or DEFAULT_REVISION,
            )
        raise _unreadable(text)

    def to_json(self) -> str:
        """Return the address as a record holds it."""
        return str(self)

    @classmethod
    def from_json(cls, record: object) -> RemoteAddress:
        """Return the address of a record.

        Raises:
            TypeError: It is no text.
        """
        if not isinstance(record, str):
            raise TypeError(f"expected an address, found {shorten(repr(record))}")
        return cls.parse(record)

    def join(self, name: str) -> str:
        """Return the path of a file within the bucket or the dataset."""
        return f"{self.path}/{name}" if self.path else name

    def at(self, revision: str) -> RemoteAddress:
        """Return the same address at another revision."""
        return replace(self, revision=revision)


def is_remote(text: str) -> bool:
    """Decide whether a text is an address, of whatever scheme, and no folder's path."""
    return _SCHEME.match(text) is not None


def _clean(path: str | None, text: str) -> str:
    parts = [part for part in (path or "").split("/") if part]
    if {".", ".."} & set(parts):
        raise _unreadable(text)
    return "/".join(parts)


def _unreadable(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is no address that mm2 reads",
        expected=_EXPECTED,
        next_step="Or give a folder of this machine. A model of a hub is owner/name@revision.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file in a remote folder, as the server describes it now."""

    name: str  # path in the folder
    size_bytes: int
    tag: str  # changes when the content does: an ETag of S3, or a hash


def stays_inside(name: str) -> bool:
    """Decide whether a listed name leads to a file below its folder: a key of S3 may hold `..`."""
    return not {"", ".", ".."} & set(name.split("/"))


class RemoteFolder(ABC):
    """A folder at a remote address. Methods raise RemoteError or CheckpointError if the server refuses or is away.

    Methods may be called from several threads and processes at once.
    """

    address: RemoteAddress  # the folder's address, at the commit that is read if the server has commits

    @abstractmethod
    def files(self) -> Mapping[str, RemoteFile]:
        """List the files by name, those of folders below too; names that lead out of the folder are left out."""

    @abstractmethod
    def find(self, name: str) -> RemoteFile | None:
        """Return a file; None if the folder has none of that name."""

    @abstractmethod
    def fetch(self, file: RemoteFile, path: Path) -> None:
        """Fetch a file to `path`."""

    @abstractmethod
    def forget(self, file: RemoteFile, path: Path) -> None:
        """Remove what was fetched to `path`, and every copy that a further `fetch` would take in its place."""

    @abstractmethod
    def check_place(self) -> None:
        """Raise if nothing can be put here, as far as the server tells before it is sent anything."""

    @abstractmethod
    def put(self, files: Mapping[str, Path], *, last: str) -> tuple[str, ...]:
        """Put local files under their names, and return the names of those that were not there already.

        The file `last` is put when all others are there. If the folder has another content of it, that is removed
        before any other file is put. So whoever finds `last` finds the files that it lists.
        """
