"""RemoteCheckpoint: a checkpoint in a folder of S3, whose files are fetched when they are needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minimax_tools.errors import CheckpointError, list_names
from minimax_tools.remote.cache import MODELS, RemoteCache, locked_file, mark_used
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
    def open(cls, source: S3Folder) -> RemoteCheckpoint:
        """List the files at an address; raise CheckpointError if there are none."""
        files = source.files()
        if not files:
            raise CheckpointError(
                f"no checkpoint at {source.address}", found="nothing", next_step="Check the address."
            )
        version = json.dumps([[file.name, file.size_bytes, file.tag] for file in files.values()])
        folder = RemoteCache.from_environment().place(MODELS, source.address, version)
        return cls(source=source, files=files, folder=folder)

    @property
    def name(self) -> str:
        """The address."""
        return str(self.source.address)

    @property
    def is_listed(self) -> bool:
        """True: a bucket is always asked."""
        return True

    def holds(self, name: str) -> bool:
        """Decide whether a file is here."""
        return (self.folder / name).exists()

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of a file, `stop` not included."""
        return self.source.read(self.files[name], start, stop)

    def lacking(self, missing: Sequence[str]) -> CheckpointError:
        """Build the error for files that the address lacks."""
        return CheckpointError(
            f"{self.name} has no {list_names(list(missing), most=_MAX_NAMED)}",
            found=f"{len(self.files)} other files",
            next_step="Check the address.",
        )

    def fetch(self, names: Iterable[str]) -> dict[str, Path]:
        """Return the paths of files by name; those that are not here are fetched."""
        wanted = sorted(set(names))
        if missing := [name for name in wanted if name not in self.files]:
            raise self.lacking(missing)
        for name in wanted:
            path = self.folder / name
            if not path.exists():
                with locked_file(path):
                    if not path.exists():
                        self.source.fetch(self.files[name], path)
        mark_used(self.folder)
        return {name: self.folder / name for name in wanted}
