"""RemoteFolder: a folder at a remote address, whose files are fetched one by one and put as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.remote.address import RemoteAddress


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
