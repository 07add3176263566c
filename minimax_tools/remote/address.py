"""RemoteAddress: a folder that is not on this machine: `s3://bucket/folder`, or `hf://datasets/owner/name@revision`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
