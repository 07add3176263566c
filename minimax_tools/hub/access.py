"""Access to a hub, and the place of a commit's files in its cache on this machine."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.errors import CheckpointError
from minimax_tools.text_enum import TextEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """Access to a hub: endpoint, token, cache and patience."""

    endpoint: str  # address of the hub, without a slash at the end
    cache_dir: Path  # cache, in the layout of huggingface_hub
    token: str | None = None  # None for the token that huggingface_hub finds (`HF_TOKEN`, a saved login)
    is_offline: bool = False  # True if only the cache is used, and no request is sent
    timeout_s: float = 10.0  # longest silence of the hub, for requests of mm2's own
    num_attempts: int = 5  # failures in a row that end a request
    # Wait after the first failure; doubled after each further one, up to a limit (`faults`).
    first_delay_s: float = 1.0
    num_workers: int = 4  # number of files that are fetched at once

    def __post_init__(self) -> None:
        if self.num_attempts < 1 or self.num_workers < 1:
            raise ValueError(f"{self.num_attempts} attempts with {self.num_workers} workers fetch nothing")

    @classmethod
    def from_environment(cls) -> HubAccess:
        """Read the access from huggingface_hub's variables (`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE`, …).

        Raises:
            CheckpointError: huggingface_hub cannot be imported.
        """
        try:
            from huggingface_hub import constants
        except ImportError as error:
            raise CheckpointError(
                "a model of the hub needs the package huggingface_hub, which cannot be imported",
                found=str(error),
                next_step="Repair it with: pip install -U huggingface_hub, or give --model a folder.",
            ) from error
        return cls(
            endpoint=constants.ENDPOINT.rstrip("/"),
            cache_dir=Path(constants.HF_HUB_CACHE).expanduser(),
            is_offline=bool(constants.HF_HUB_OFFLINE),
            timeout_s=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
        )


class RepositoryKind(TextEnum):
    """The kinds of a hub's repositories that mm2 reads."""

    MODEL = "model"
    DATASET = "dataset"

    @property
    def option(self) -> str:
        """The option of a command that takes a folder in place of such a repository."""
        return "--model" if self is RepositoryKind.MODEL else "--golden"

    @property
    def pattern(self) -> str:
        """The form of such a repository's name with a revision."""
        return "owner/name@revision" if self is RepositoryKind.MODEL else "hf://datasets/owner/name@revision"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a repository. Size and hash are None if the hub does not tell them, or is not asked."""

    name: str  # path in the repository
    size_bytes: int | None
    content_hash: str | None  # sha256 of a large file, git's sha1 of a small one


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCommit:
    """A commit of a hub's model or dataset, and its place in the cache."""

    model: str  # `owner/name`
    revision: str  # branch, tag or commit that was asked for
    commit: str  # commit of that revision; the revision itself while it is not known
    access: HubAccess  # access to the hub
    kind: RepositoryKind = RepositoryKind.MODEL

    @property
    def cache(self) -> Path:
        """Folder of this repository in the cache."""
        return self.access.cache_dir / f"{self.kind}s--{self.model.replace('/', '--')}"

    @property
    def folder(self) -> Path:
        """Folder of the snapshot: the commit's cached files, under their names."""
        return self.cache / "snapshots" / self.commit

    @property
    def reference(self) -> Path:
        """File in the cache that names the revision's commit."""
        return self.cache / "refs" / self.revision

    def blob(self, content_hash: str) -> Path:
        """Return the path in the cache for content with this hash; some mirrors give a name that is none."""
        return self.cache / "blobs" / content_hash

    def holds(self, file: HubFile) -> bool:
        """Decide whether the snapshot has the file, with the right size if that is known.

        What a link leads to outside of the cache is not the repository's.
        """
        path = self.folder / file.name
        return path.is_file() and self.is_inside(path) and file.size_bytes in (None, path.stat().st_size)

    def discard(self, name: str) -> None:
        """Remove a file and its content from the cache, so that it is fetched anew; nothing outside is touched."""
        path = self.folder / name
        if self.is_inside(path):
            path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def is_inside(self, path: Path) -> bool:
        """Decide whether a path of the cache leads to content in the cache."""
        content = path.resolve()
        # The folder of blobs may itself be a link, to another disk. Some blobs are links to others of the whole cache.
        places = (self.access.cache_dir, self.cache, self.cache / "blobs")
        return any(content.is_relative_to(place.resolve()) for place in places)


def hub_tools() -> Any:
    """Return the module huggingface_hub.utils, untyped because its types differ between versions."""
    return importlib.import_module("huggingface_hub.utils")
