"""A snapshot of a hub's model or dataset: one commit and its files, as the hub lists them or the cache holds them."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from minimax_tools.errors import CheckpointError, list_names
from minimax_tools.hub.access import HubCommit, HubFile, attempt, hub_tools, is_transient, translate
from minimax_tools.machine.files import whole_file
from minimax_tools.machine.size import format_size

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NUM_NAMES_SHOWN = 6
# Attempts at a listing where the cache may do without.
_NUM_ATTEMPTS_WITH_CACHE = 2
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_HASHED_AT_ONCE_BYTES = 1 << 20
_MAX_SHOWN = 200


class NoRangesError(CheckpointError):
    """A server that sends whole files only."""


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


def run_all(work: Callable[[Item], object], items: Sequence[Item], *, num_workers: int = 4) -> None:
    """Run `work` on all items, several at once. The first error ends the others, and is raised."""
    stop = threading.Event()
    # The threads share it, so each item is taken once.
    waiting = iter(items)
    errors: list[Exception] = []

    def run() -> None:
        for item in waiting:
            if stop.is_set():
                return
            try:
                work(item)
            except Exception as error:
                errors.append(error)
                stop.set()

    # A user's stop does not wait for a transfer of gigabytes: what still runs ends with the process.
    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(num_workers, len(items)))]
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


def fetch_file(commit: HubCommit, file: HubFile) -> Path:
    """Return the file's path in the snapshot; it is fetched if it is absent or has another size."""
    if commit.holds(file):
        return commit.folder / file.name
    try:
        metadata = attempt(lambda: _read_metadata(commit, file), access=commit.access, name=file.name)
        _refuse_other_place(commit, file, metadata.etag or "")
        return _fetch_verified(commit, file, metadata)
    except Exception as error:
        raise translate(error, commit, file=file.name) from error


def read_range(commit: HubCommit, file: HubFile, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` of a file, `stop` not included.

    Raises:
        NoRangesError: The server sends whole files only.
    """
    if start == stop:
        return b""
    try:
        return attempt(
            lambda: _read_range_once(commit, file, start, stop), access=commit.access, name=file.name
        )
    except Exception as error:
        raise translate(error, commit, file=file.name) from error


def hash_like(path: Path, known_hash: str) -> str:
    """Return the hash of a local file in the kind of a hub's: sha256, or git's sha1 of a small file."""
    digest = hashlib.sha256()
    if _GIT_SHA1.fullmatch(known_hash):
        # git hashes a file's size before its content.
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as content:
        while piece := content.read(_HASHED_AT_ONCE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _read_metadata(commit: HubCommit, file: HubFile) -> Any:
    """Ask for the etag, and whether the hub offers the file by xet, its protocol for large files.

    The etag is the name of the content in the cache. It is the content's hash, but a mirror may send another.
    """
    from huggingface_hub import get_hf_file_metadata

    access = commit.access
    return get_hf_file_metadata(_url(commit, file), token=access.token, timeout=access.timeout_s)


def _refuse_other_place(commit: HubCommit, file: HubFile, etag: str) -> None:
    """Raise if an etag leads out of the cache's folder of blobs; links that lead out of the cache are removed."""
    if not etag or etag.startswith(".") or {"/", "\\", "\0"} & set(etag):
        raise CheckpointError(
            f"{file.name} of {commit.model} has an etag that is no name for a file",
            expected="its sha256, or another plain name",
            found=repr(etag)[:_MAX_SHOWN],
            next_step="Check HF_ENDPOINT: this is no right hub.",
        )
    # huggingface_hub before 2.0 appends to what is incomplete.
    for path in (commit.blob(etag), commit.blob(f"{etag}.incomplete")):
        if path.is_symlink() and not commit.is_inside(path):
            path.unlink()


def _fetch_verified(commit: HubCommit, file: HubFile, metadata: Any) -> Path:
    """Fetch the file into the snapshot, once more if it comes corrupted."""
    content_hash = next((text for text in (file.content_hash, metadata.etag) if _is_hash(text)), None)
    is_on_xet = metadata.xet_file_data is not None
    for is_last in (False, True):
        if not commit.holds(file):
            # huggingface_hub would take a copy of another size, or one elsewhere, as it is.
            commit.discard(file.name)
        path = attempt(
            lambda: _download(commit, file, is_on_xet=is_on_xet), access=commit.access, name=file.name
        )
        damage = _find_damage(path, file, content_hash)
        if damage is None:
            return path
        commit.discard(file.name)
        if not is_last:
            logger.warning("%s came corrupted (%s): fetching it anew.", file.name, damage)
    raise CheckpointError(
        f"{file.name} of {commit.model} came corrupted twice from {commit.access.endpoint}",
        expected=f"{file.size_bytes} bytes of {_hash_kind(content_hash)} {content_hash}",
        found=damage,
        next_step="A proxy or mirror may spoil it: try another HF_ENDPOINT or network, or fetch it with "
        f"`hf download` elsewhere and give {commit.kind.option} the folder.",
    )


def _download(commit: HubCommit, file: HubFile, *, is_on_xet: bool) -> Path:
    from huggingface_hub import hf_hub_download

    access = commit.access
    try:
        path = hf_hub_download(
            commit.model,
            file.name,
            repo_type=str(commit.kind),
            revision=commit.commit,
            cache_dir=access.cache_dir,
            endpoint=access.endpoint,
            token=access.token,
            etag_timeout=access.timeout_s,
        )
    except Exception as error:
        if not is_on_xet or is_transient(error) or getattr(error, "errno", None) is not None:
            raise
        raise CheckpointError(
            f"{file.name} of {commit.model} could not be fetched by xet from {access.endpoint}",
            found=" ".join(str(error).split())[:_MAX_SHOWN],
            next_step="Set HF_HUB_DISABLE_XET=1: then it is fetched over plain HTTP.",
        ) from error
    return Path(path)


def _find_damage(path: Path, file: HubFile, content_hash: str | None) -> str | None:
    """Describe the wrong size or hash of the file at `path`; None if both are right, or unknown."""
    size_bytes = path.stat().st_size
    if file.size_bytes not in (None, size_bytes):
        return f"{size_bytes} bytes"
    if content_hash is None:
        logger.warning("%s is not verified: the hub gives no hash for it.", file.name)
        return None
    actual_hash = hash_like(path, content_hash)
    if actual_hash == content_hash:
        return None
    return f"{size_bytes} bytes of {_hash_kind(content_hash)} {actual_hash}"


def _read_range_once(commit: HubCommit, file: HubFile, start: int, stop: int) -> bytes:
    tools, access = hub_tools(), commit.access
    headers = {
        **tools.build_hf_headers(token=access.token),
        # A compressed body has other bytes than the file.
        "Accept-Encoding": "identity",
        # The header's range includes its last byte.
        "Range": f"bytes={start}-{stop - 1}",
    }
    session, url = tools.get_session(), _url(commit, file)
    # The session is one of httpx or, before huggingface_hub 1.0, of requests.
    is_httpx = callable(getattr(session, "stream", None))
    if is_httpx:
        opened = session.stream("GET", url, headers=headers, timeout=access.timeout_s)
    else:
        opened = session.get(url, headers=headers, timeout=access.timeout_s, stream=True)
    with opened as response:
        tools.hf_raise_for_status(response)
        # Nothing of the body is read before: it may be the whole file.
        _check_range(response, commit, file, start, stop)
        data: bytes = response.read() if is_httpx else response.content
    if len(data) != stop - start:
        raise ConnectionError(f"{len(data)} of {stop - start} bytes came")
    return data


def _check_range(response: Any, commit: HubCommit, file: HubFile, start: int, stop: int) -> None:
    """Check that a response is this part of this file."""
    if response.status_code != 206:
        is_whole = response.status_code == 200
        raise NoRangesError(
            f"{commit.access.endpoint} gives no part of {file.name}",
            expected="status 206",
            found="status 200, the whole file" if is_whole else f"status {response.status_code}",
            next_step="Fetch whole files: mm2-split fetch.",
        )
    part, _, size = response.headers.get("content-range", "").partition("/")
    # A size of "*" is unknown to the server.
    if part != f"bytes {start}-{stop - 1}" or not (
        file.size_bytes is None or size in ("*", str(file.size_bytes))
    ):
        raise ConnectionError(
            f"bytes {start} to {stop - 1} of {file.size_bytes} were asked for, {part!r} of {size} came"
        )


def _url(commit: HubCommit, file: HubFile) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(
        commit.model,
        file.name,
        repo_type=str(commit.kind),
        revision=commit.commit,
        endpoint=commit.access.endpoint,
    )


def _hash_kind(content_hash: str | None) -> str:
    return "git sha1" if content_hash and _GIT_SHA1.fullmatch(content_hash) else "sha256"


def _is_hash(text: str | None) -> bool:
    return text is not None and bool(_SHA256.fullmatch(text) or _GIT_SHA1.fullmatch(text))
