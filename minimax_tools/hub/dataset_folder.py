"""DatasetFolder: a folder in a hub's dataset. Files are fetched into huggingface_hub's cache, and put in one commit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from minimax_tools.errors import NetworkLossError, RemoteError
from minimax_tools.hub.access import (
    HubAccess,
    HubCommit,
    HubFile,
    NoRepositoryError,
    RepositoryKind,
    attempt,
    is_transient,
    root_cause,
    translate,
)
from minimax_tools.hub.snapshot import (
    HubSnapshot,
    find_snapshot,
    hash_like,
    is_commit,
    list_files,
    quieten_hub,
)
from minimax_tools.remote.address import (
    DEFAULT_REVISION,
    RemoteAddress,
    RemoteFile,
    RemoteFolder,
    Scheme,
    stays_inside,
)
from minimax_tools.remote.s3_folder import S3Folder

_MAX_FOUND_LENGTH = 300


def open_folder(address: RemoteAddress) -> RemoteFolder:
    """Return the folder at an address of any scheme; nothing is asked yet."""
    if address.scheme is Scheme.S3:
        return S3Folder(address=address)
    return DatasetFolder(address, access=HubAccess.from_environment())


class DatasetFolder(RemoteFolder):
    """A folder in a dataset of a hub."""

    def __init__(self, address: RemoteAddress, *, access: HubAccess) -> None:
        self._asked = address
        self._access = access

    @property
    def address(self) -> RemoteAddress:  # type: ignore[override]  # known once the hub has named the commit
        """The folder's address, at the commit that the hub named when it was asked first."""
        return self._asked.at(self._snapshot.commit.commit)

    def files(self) -> Mapping[str, RemoteFile]:
        prefix = f"{self._asked.path}/" if self._asked.path else ""
        return {
            name.removeprefix(prefix): _describe(name.removeprefix(prefix), file, self._snapshot)
            for name, file in sorted(self._snapshot.files.items())
            if name.startswith(prefix) and stays_inside(name.removeprefix(prefix))
        }

    def find(self, name: str) -> RemoteFile | None:
        file = self._snapshot.files.get(self._asked.join(name))
        if file is None and not self._snapshot.is_listed:
            # The hub was not asked: it may have the file.
            raise self._snapshot.lacking([self._asked.join(name)])
        return None if file is None else _describe(name, file, self._snapshot)

    def fetch(self, file: RemoteFile, path: Path) -> None:
        name = self._asked.join(file.name)
        fetched = self._snapshot.fetch([name])[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        # A link: the hub's cache is shared with other programs, and holds the file once.
        path.symlink_to(fetched.resolve())

    def forget(self, file: RemoteFile, path: Path) -> None:
        self._snapshot.commit.discard(self._asked.join(file.name))
        path.unlink(missing_ok=True)

    def check_place(self) -> None:
        if self._access.is_offline:
            raise RemoteError(
                f"nothing can be put at {self._asked}: the hub is not asked",
                found="HF_HUB_OFFLINE is set",
                next_step="Unset it, or name a folder of this machine.",
            )
        if is_commit(self._asked.revision):
            raise RemoteError(
                f"nothing can be put at {self._asked}: a commit stays as it is",
                next_step=f"Name a branch: {self._asked.at(DEFAULT_REVISION)}.",
            )
        try:
            # The hub itself, not the cache.
            attempt(lambda: list_files(self._commit), access=self._access, name=str(self._asked))
        except Exception as error:
            # A dataset or a branch that is not there is made by `put`.
            if not isinstance(translate(error, self._commit), NoRepositoryError):
                raise self._refusal(error) from error

    def put(self, files: Mapping[str, Path], *, last: str) -> tuple[str, ...]:
        """Put files in one commit, so that a revision has all of them or none: `last` needs no order.

        Large files that an interrupted call has sent are not sent again.
        """
        from huggingface_hub import CommitOperationAdd, HfApi

        changed = tuple(name for name, path in sorted(files.items()) if not self._holds(name, path))
        if not changed:
            return ()
        quieten_hub()
        api = HfApi(endpoint=self._access.endpoint, token=self._access.token)
        address = self._asked
        operations = [
            CommitOperationAdd(path_in_repo=address.join(name), path_or_fileobj=str(files[name]))
            for name in changed
        ]

        def commit() -> None:
            api.create_repo(address.repository, repo_type="dataset", exist_ok=True)
            if address.revision != DEFAULT_REVISION:
                api.create_branch(
                    address.repository, branch=address.revision, repo_type="dataset", exist_ok=True
                )
            api.create_commit(
                address.repository,
                operations,
                commit_message=f"{address.path or address.repository}: written by mm2",
                repo_type="dataset",
                revision=address.revision,
            )

        try:
            attempt(commit, access=self._access, name=str(address))
        except Exception as error:
            raise self._refusal(error) from error
        return changed

    def _holds(self, name: str, path: Path) -> bool:
        """Decide whether the dataset has a file's content under its name; no if there is no such dataset yet."""
        try:
            known = self._snapshot.files.get(self._asked.join(name))
        except NoRepositoryError:
            return False
        if known is None or known.content_hash is None or known.size_bytes != path.stat().st_size:
            return False
        return hash_like(path, known.content_hash) == known.content_hash

    def _refusal(self, error: BaseException) -> RemoteError:
        error = root_cause(error)
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_FOUND_LENGTH].rstrip(" .")
        status: Any = getattr(getattr(error, "response", None), "status_code", None)
        what = f"nothing could be put at {self._asked}"
        if is_transient(error):
            return NetworkLossError(
                f"{what}: {self._access.endpoint} does not answer, or breaks off",
                found=found,
                next_step="Check the network and HF_ENDPOINT, and run again: what was sent is not sent twice.",
            )
        if status in (401, 403):
            return RemoteError(
                f"{what}: the hub wants a token that may write there",
                found=found,
                next_step="Log in with `hf auth login`, or set HF_TOKEN to a token with write access.",
            )
        return RemoteError(
            f"{what}: the hub refuses it",
            found=found,
            next_step="Name a branch of a dataset of yours: hf://datasets/owner/name@main.",
        )

    @property
    def _commit(self) -> HubCommit:
        return HubCommit(
            model=self._asked.repository,
            revision=self._asked.revision,
            commit=self._asked.revision,
            access=self._access,
            kind=RepositoryKind.DATASET,
        )

    @cached_property
    def _snapshot(self) -> HubSnapshot:
        return find_snapshot(self._commit)


def _describe(name: str, file: HubFile, snapshot: HubSnapshot) -> RemoteFile:
    return RemoteFile(
        name=name,
        size_bytes=file.size_bytes or 0,
        # The cache alone, when the hub is not asked, knows the commit.
        tag=file.content_hash or snapshot.commit.commit,
    )
