"""A snapshot of a hub's model or dataset: one commit and its files, as the hub lists them or the cache holds them."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from minimax_tools.errors import CheckpointError, list_names
from minimax_tools.hub.access import HubAccess, HubCommit, HubFile, RepositoryKind, hub_tools
from minimax_tools.hub.faults import Attempts, is_transient, translate
from minimax_tools.hub.transfer import HubTransfer
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.size import format_size

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_NAMES_SHOWN = 6


class NotCachedError(CheckpointError):
    """Files that are not in the cache, while the hub is not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSnapshot:
    """A commit and its known files."""

    commit: HubCommit
    # By name: all files that the hub lists or, if it is not asked, those in the cache.
    files: Mapping[str, HubFile]
    is_listed: bool  # True if the hub listed the files

    @property
    def folder(self) -> Path:
        """Folder of the fetched files, under their names."""
        return self.commit.folder

    def fetch(self, names: Iterable[str]) -> dict[str, Path]:
        """Return the files' paths by name; files that the cache lacks are fetched.

        Raises:
            NotCachedError: The cache lacks files, and the hub is not asked.
            CheckpointError: The model has no such file, the disk is too small, or a transfer failed for good.
        """
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
        """Build the error for files that the model lacks, or that are not cached while the hub is not asked."""
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
        needed_bytes = sum(self._missing_bytes(file) for file in absent)
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

    def _missing_bytes(self, file: HubFile) -> int:
        """Return the size of a file less what an earlier transfer has left in the cache."""
        here_bytes = 0
        if file.content_hash is not None:
            candidates = (self.commit.blob(file.content_hash), self.commit.part(file.content_hash))
            here_bytes = max((path.stat().st_size for path in candidates if path.is_file()), default=0)
        # What is left may be too long; it is dropped later, so it does not make room for other files.
        return max((file.size_bytes or 0) - here_bytes, 0)

    def _transfer(self, absent: list[HubFile]) -> None:
        total_bytes = sum(file.size_bytes or 0 for file in absent)
        logger.info(
            "Fetching %d file%s (%s) of %s into %s.",
            len(absent),
            "" if len(absent) == 1 else "s",
            format_size(total_bytes),
            self.commit.model,
            self.commit.access.cache_dir,
        )
        stop = threading.Event()
        with _progress_bar(self.commit.model, total_bytes) as bar:
            lock = threading.Lock()

            def show(num_bytes: int) -> None:
                with lock:
                    bar.update(num_bytes)

            transfer = HubTransfer(self.commit, stop=stop, on_bytes=show)
            run_all(transfer.fetch, absent, num_workers=self.commit.access.num_workers, stop=stop)
        self._remember_revision()

    def _remember_revision(self) -> None:
        """Store the commit of the revision in the cache, for runs without the hub."""
        if self.commit.revision == self.commit.commit:
            return
        reference = self.commit.reference
        reference.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(reference) as file:
            file.write(self.commit.commit)


def with_snapshot(
    model: str,
    revision: str,
    *,
    access: HubAccess,
    work: Callable[[HubSnapshot], Result],
    kind: RepositoryKind = RepositoryKind.MODEL,
) -> Result:
    """Return the result of `work` on the snapshot of a model, or of a dataset.

    Offline it is the cache's snapshot, else the hub's. If the hub does not answer, it is the cache's snapshot too. If
    that lacks files that `work` needs, the hub is asked again, several times.

    Raises:
        CheckpointError: `work` raised it. Or the hub cannot be reached, has no such model or revision, or refuses
            the token.
    """
    # The commit is unknown until the hub or the cache names it.
    asked = HubCommit(model=model, revision=revision, commit=revision, access=access, kind=kind)
    cached = _find_cached(asked)
    if access.is_offline:
        logger.info("HF_HUB_OFFLINE is set: what the cache has of %s is used.", model)
        return work(cached or HubSnapshot(commit=asked, files={}, is_listed=False))
    if cached is None:
        return work(_list_patiently(asked))
    try:
        snapshot = list_files(asked)
    except Exception as error:
        if not is_transient(error):
            raise translate(error, asked) from error
        return _work_on_cache(cached, error, work)
    return work(snapshot)


def _work_on_cache(cached: HubSnapshot, error: Exception, work: Callable[[HubSnapshot], Result]) -> Result:
    """Return the result of `work` on the cache; if that lacks files, try the hub several times."""
    commit = cached.commit
    try:
        result = work(cached)
    except NotCachedError:
        return work(_list_patiently(commit))
    logger.warning(
        "%s does not answer (%s): using the cached commit %s of %s.",
        commit.access.endpoint,
        type(error).__name__,
        commit.commit[:8],
        commit.model,
    )
    return result


def _list_patiently(asked: HubCommit) -> HubSnapshot:
    """Ask the hub for the revision's commit and files, in several attempts."""
    attempts = Attempts(asked.access, name=asked.model, stop=threading.Event())
    try:
        return attempts.run(lambda: list_files(asked))
    except Exception as error:
        raise translate(error, asked) from error


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
    work: Callable[[HubFile], object], files: list[HubFile], *, num_workers: int, stop: threading.Event
) -> None:
    """Run `work` on all files, several at once. The first error is raised, and sets `stop` to end the others."""
    with ThreadPoolExecutor(num_workers, thread_name_prefix="hub") as pool:
        futures = [pool.submit(work, file) for file in files]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _progress_bar(model: str, total_bytes: int) -> Any:
    """Make huggingface_hub's progress bar; it shows if mm2's progress does, and stderr is a terminal."""
    is_quiet = quieten_hub()
    # With None the bar shows only in a terminal.
    is_disabled = True if is_quiet else None
    return hub_tools().tqdm(total=total_bytes, desc=model, unit="B", unit_scale=True, disable=is_disabled)


def quieten_hub() -> bool:
    """Show or hide the bars of huggingface_hub's own transfers as mm2's progress is; return whether that is hidden."""
    from huggingface_hub import constants

    tools = hub_tools()
    is_quiet = not logger.isEnabledFor(logging.INFO)
    # If the user sets the variable, it decides: huggingface_hub warns of attempts to change it.
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        (tools.disable_progress_bars if is_quiet else tools.enable_progress_bars)()
    return is_quiet
