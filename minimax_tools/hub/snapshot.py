"""A snapshot of a hub's model or dataset: one commit and its files, as the hub lists them or the cache holds them."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from minimax_tools.errors import CheckpointError, list_names
from minimax_tools.hub.access import HubCommit, HubFile, hub_tools
from minimax_tools.hub.faults import attempt, is_transient, translate
from minimax_tools.hub.transfer import fetch_file, read_range
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.size import format_size

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_NAMES_SHOWN = 6
# Attempts at a listing where the cache may do without.
_NUM_ATTEMPTS_WITH_CACHE = 2


class NotCachedError(CheckpointError):
    """Files that are not in the cache, while the hub is not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSnapshot:
    """A commit and its known files."""

    commit: HubCommit
    # By name: all files that the hub lists or, if it is not asked, those in the cache.
    files: Mapping[str, HubFile]
    is_listed: bool  # True if the hub listed the files
    failure: CheckpointError | None = None  # why the hub was asked and did not list them

    @property
    def folder(self) -> Path:
        """Folder of the fetched files, under their names."""
        return self.commit.folder

    @property
    def name(self) -> str:
        """The model, in words."""
        return f"the hub's model {self.commit.model}"

    def holds(self, name: str) -> bool:
        """Decide whether the cache has a file, with the right size if that is known."""
        return name in self.files and self.commit.holds(self.files[name])

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` of a file from the hub, `stop` not included."""
        return read_range(self.commit, self.files[name], start, stop)

    def fetch(self, names: Iterable[str]) -> dict[str, Path]:
        """Return the files' paths by name; files that the cache lacks are fetched."""
        wanted = sorted(set(names))
        missing = [name for name in wanted if name not in self.files]
        if missing:
            raise self.lacking(missing)
        absent = [self.files[name] for name in wanted if not self.commit.holds(self.files[name])]
        if absent:
            self._check_room(absent)
            self._transfer(absent)
        return {name: self.folder / name for name in wanted}

    def lacking(self, missing: Sequence[str]) -> CheckpointError:
        """Build the error for files that the model lacks, or that are not cached while the hub gives none."""
        if self.failure is not None:
            return self.failure
        names = list_names(list(missing), most=_NUM_NAMES_SHOWN)
        if self.is_listed:
            return CheckpointError(
                f"{self.commit.model} at revision {self.commit.revision!r} has no {names}",
                found=f"{len(self.files)} other files",
                next_step="Check the id and the revision; if the index is wrong, tell the model's owner.",
            )
        return NotCachedError(
            f"the cache at {self.commit.access.cache_dir} lacks {names} of {self.commit.model}, "
            "and the hub is not asked",
            found=f"{len(self.files)} files of it",
            next_step="Fetch them while online (HF_HUB_OFFLINE unset), or give "
            f"{self.commit.kind.option} a folder that has them.",
        )

    def _check_room(self, absent: list[HubFile]) -> None:
        # Another commit may have the same content.
        needed_bytes = sum(
            file.size_bytes or 0
            for file in absent
            if file.content_hash is None or not self.commit.blob(file.content_hash).is_file()
        )
        existing_folder = self.commit.access.cache_dir.absolute()
        while not existing_folder.exists():
            existing_folder = existing_folder.parent
        free_bytes = shutil.disk_usage(existing_folder).free
        if needed_bytes > free_bytes:
            raise CheckpointError(
                f"the disk at {existing_folder} is too small for what is missing of {self.commit.model}",
                expected=f"{format_size(needed_bytes)} for {len(absent)} files",
                found=f"{format_size(free_bytes)} free",
                next_step="Make room, set HF_HOME to a larger disk, or choose fewer layers.",
            )

    def _transfer(self, absent: list[HubFile]) -> None:
        logger.info(
            "Fetching %d file%s (%s) of %s into %s.",
            len(absent),
            "" if len(absent) == 1 else "s",
            format_size(sum(file.size_bytes or 0 for file in absent)),
            self.commit.model,
            self.commit.access.cache_dir,
        )
        quieten_hub()
        run_all(
            lambda file: fetch_file(self.commit, file), absent, num_workers=self.commit.access.num_workers
        )
        self._remember_revision()

    def _remember_revision(self) -> None:
        """Store the commit of the revision in the cache, for runs without the hub."""
        if self.commit.revision == self.commit.commit:
            return
        reference = self.commit.reference
        reference.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(reference) as file:
            file.write(self.commit.commit)


def find_snapshot(asked: HubCommit) -> HubSnapshot:
    """Return the snapshot of a model or a dataset: offline, or if the hub does not answer, the cache's.

    The commit of `asked` is its revision, until the hub or the cache names it.
    """
    access, model = asked.access, asked.model
    cached = _find_cached(asked)
    if access.is_offline:
        logger.info("HF_HUB_OFFLINE is set: what the cache has of %s is used.", model)
        return cached or HubSnapshot(commit=asked, files={}, is_listed=False)
    if cached is not None:
        num_attempts = min(access.num_attempts, _NUM_ATTEMPTS_WITH_CACHE)
        access = replace(access, num_attempts=num_attempts)
    try:
        return attempt(lambda: list_files(asked), access=access, name=model)
    except Exception as error:
        failure = translate(error, asked)
        if cached is None or not is_transient(error):
            raise failure from error
        logger.warning(
            "%s does not answer (%s): using the cached commit %s of %s.",
            access.endpoint,
            type(error).__name__,
            cached.commit.commit[:8],
            model,
        )
        return replace(cached, failure=failure)


def is_commit(revision: str) -> bool:
    """Decide whether a revision is a whole commit, and no branch or tag."""
    return _COMMIT.fullmatch(revision) is not None


def list_files(asked: HubCommit) -> HubSnapshot:
    """Ask the hub for the revision's commit and files, once."""
    from huggingface_hub import HfApi

    access = asked.access
    api = HfApi(endpoint=access.endpoint, token=access.token)
    # Untyped: the class depends on the kind of the repository.
    info: Any = api.repo_info(
        asked.model,
        repo_type=str(asked.kind),
        revision=asked.revision,
        files_metadata=True,
        timeout=access.timeout_s,
    )
    if info.sha is None or not is_commit(info.sha):
        raise ValueError(f"a listing without a commit: {info.sha!r}")
    files = (
        HubFile(
            name=sibling.rfilename,
            size_bytes=sibling.size,
            # Large files lie in LFS, by sha256; small ones in git.
            content_hash=sibling.blob_id if sibling.lfs is None else sibling.lfs["sha256"],
        )
        for sibling in info.siblings or ()
    )
    return HubSnapshot(
        commit=replace(asked, commit=info.sha),
        files={file.name: file for file in files if _is_inside(file.name)},
        is_listed=True,
    )


def _find_cached(asked: HubCommit) -> HubSnapshot | None:
    """Return the revision with the files in the cache; None if the cache lacks the revision."""
    commit = asked
    if not is_commit(asked.revision):
        try:
            commit = replace(asked, commit=asked.reference.read_text(encoding="utf-8").strip())
        except OSError:
            return None
    if not commit.folder.is_dir():
        return None
    names = (
        path.relative_to(commit.folder).as_posix() for path in commit.folder.rglob("*") if path.is_file()
    )
    files = {name: HubFile(name=name, size_bytes=None, content_hash=None) for name in sorted(names)}
    return HubSnapshot(commit=commit, files=files, is_listed=False)


def _is_inside(name: str) -> bool:
    """Decide whether a name from the hub stays inside the snapshot's folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def run_all(
    work: Callable[[Item], object],
    files: Sequence[Item],
    *,
    num_workers: int = 4,
    stop: threading.Event | None = None,
) -> None:
    """Run `work` on all files, several at once. The first error sets `stop`, which ends the others, and is raised."""
    stop = stop or threading.Event()
    # The threads share it, so each file is taken once.
    waiting = iter(files)
    errors: list[Exception] = []

    def run() -> None:
        for file in waiting:
            if stop.is_set():
                return
            try:
                work(file)
            except Exception as error:
                errors.append(error)
                stop.set()

    # A user's stop does not wait for a transfer of gigabytes: what still runs ends with the process.
    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(num_workers, len(files)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        raise
    if errors:
        raise errors[0]


def quieten_hub() -> None:
    """Show or hide the bars of huggingface_hub's transfers as mm2's progress is."""
    from huggingface_hub import constants

    tools = hub_tools()
    # If the user sets the variable, it decides: huggingface_hub warns of attempts to change it.
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        is_shown = logger.isEnabledFor(logging.INFO)
        (tools.enable_progress_bars if is_shown else tools.disable_progress_bars)()
