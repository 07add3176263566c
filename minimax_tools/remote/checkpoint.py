"""RemoteCheckpoint: a checkpoint in a folder of S3, whose files are fetched when they are needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import CheckpointError, list_names
from minimax_tools.remote.cache import MODELS, RemoteCache, mark_used
from minimax_tools.remote.remote_folder import RemoteFile
from minimax_tools.remote.s3_folder import S3Folder

_MAX_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A checkpoint in a folder of S3 as it was listed; another version of its files has another `folder`."""

    source: S3Folder
    files: Mapping[str, RemoteFile]  # by name
    folder: Path  # folder of the files that are here, under their names

    @classmethod
    def open(cls, source: S3Folder, *, cache: RemoteCache | None = None) -> RemoteCheckpoint:
        """List the files at an address.

        Raises:
            RemoteError: The server refuses, or is away.
            CheckpointError: There is no file.
        """
        files = source.files()
        if not files:
            raise CheckpointError(
                f"no checkpoint at {source.address}", found="nothing", next_step="Check the address."
            )
        version = json.dumps([[file.name, file.size_bytes, file.tag] for file in files.values()])
        content = hashlib.sha256(f"{source.address} {version}".encode()).hexdigest()
        cache = cache or RemoteCache.from_environment()
        return cls(source=source, files=files, folder=cache.place(MODELS, source.address, content))

    def fetch(self, names: Iterable[str]) -> dict[str, Path]:
        """Return the paths of files by name; those that are not here are fetched.

        Raises:
            CheckpointError: There is no such file.
            RemoteError: It could not be fetched.
        """
        wanted = sorted(set(names))
        if missing := [name for name in wanted if name not in self.files]:
            raise CheckpointError(
                f"{self.source.address} has no {list_names(missing, most=_MAX_NAMED)}",
                found=f"{len(self.files)} other files",
                next_step="Check the address.",
            )
        for name in wanted:
            self.source.hold(self.files[name], self.folder / name)
        mark_used(self.folder)
        return {name: self.folder / name for name in wanted}
