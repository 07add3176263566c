"""Access to a hub, and the place of a commit's files in its cache on this machine."""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from minimax_tools.errors import CheckpointError
from minimax_tools.text_enum import TextEnum

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_LONGEST_DELAY_S = 30.0
# The hub counts requests in windows of five minutes. A longer wait is not worth it.
_LONGEST_ASKED_DELAY_S = 330.0
_HTTP_LIBRARIES = frozenset({"requests", "urllib3", "httpx", "httpx2", "httpcore"})
# Timeout, too early, too many requests.
_TRANSIENT_STATUSES = frozenset({408, 425, 429})
# Header of the hub: no requests remain (r=0), and the window ends in t seconds.
_RATE_LIMIT = re.compile(r"r=0\b.*?\bt=(\d+)")
_MAX_FOUND_LENGTH = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """Access to a hub: endpoint, token, cache and patience."""

    endpoint: str  # address of the hub, without a slash at the end
    cache_dir: Path  # cache, in the layout of huggingface_hub
    token: str | None = None  # None for the token that huggingface_hub finds (`HF_TOKEN`, a saved login)
    is_offline: bool = False  # True if only the cache is used, and no request is sent
    timeout_s: float = 10.0  # longest silence of the hub, for requests of mm2's own
    num_attempts: int = 5  # failures in a row that end a request
    # Wait after the first failure; doubled after each further one, up to a limit.
    first_delay_s: float = 1.0
    num_workers: int = 4  # number of files that are fetched at once

    @classmethod
    def from_environment(cls) -> HubAccess:
        """Read the access from huggingface_hub's variables (`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE`, …)."""
        from huggingface_hub import constants

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


class NoRepositoryError(CheckpointError):
    """A repository, or a revision of it, that the hub does not have."""


def attempt(work: Callable[[], Result], *, access: HubAccess, name: str) -> Result:
    """Return the result of `work`, which is called again after transient failures; `name` is for the log."""
    for num_failed in count(1):
        try:
            return work()
        except Exception as error:
            asked_s = _asked_delay_s(error)
            is_last = num_failed >= access.num_attempts or asked_s > _LONGEST_ASKED_DELAY_S
            if is_last or not is_transient(error):
                raise
            delay_s = max(asked_s, min(_LONGEST_DELAY_S, access.first_delay_s * 2 ** (num_failed - 1)))
            logger.warning(
                "%s: %s: %s. Attempt %d of %d in %.3g s.",
                name,
                type(error).__name__,
                " ".join(str(error).split())[:200].rstrip("."),
                num_failed + 1,
                access.num_attempts,
                delay_s,
            )
        time.sleep(delay_s)
    raise AssertionError("the loop ends with a result or an error")


def is_transient(error: BaseException) -> bool:
    """Decide whether a request may succeed later: no connection, a timeout, a busy or failing server."""
    error = root_cause(error)
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT_STATUSES or status >= 500
    if isinstance(error, (ConnectionError, TimeoutError)):
        # huggingface_hub's refusal to ask the hub is a ConnectionError too.
        return type(error).__name__ != "OfflineModeIsEnabled"
    return _library(error) in _HTTP_LIBRARIES


def translate(error: BaseException, commit: HubCommit, *, file: str | None = None) -> CheckpointError:
    """Build the error for a request about a model, or one `file` of it, after its last attempt failed.

    A CheckpointError, such as one about a server without byte ranges, is returned as it is.
    """
    error = root_cause(error)
    if isinstance(error, CheckpointError):
        return error
    model, access = commit.model, commit.access
    subject = f"{file} of {model}" if file else f"the hub's {commit.kind} {model}"
    found = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_FOUND_LENGTH].rstrip(" .")
    if is_transient(error):
        return CheckpointError(
            f"{subject} could not be fetched: {access.endpoint} does not answer, or breaks off",
            found=found,
            next_step="Check the network and HF_ENDPOINT and run again: files that came whole are kept. Or fetch "
            "it with `hf download` elsewhere and give "
            f"{commit.kind.option} the folder.",
        )
    # huggingface_hub raises an OSError without a number for a body of another size than announced.
    if _library(error) == "builtins" and isinstance(error, OSError) and error.errno is not None:
        return CheckpointError(
            f"{subject} cannot be stored in {access.cache_dir}",
            found=str(error),
            next_step="Make room there or mend its permissions, or set HF_HOME to another disk.",
        )
    reason, next_step = _explain(error, commit, file)
    is_absent = type(error).__name__ in ("RepositoryNotFoundError", "RevisionNotFoundError")
    return (NoRepositoryError if is_absent else CheckpointError)(
        f"{subject} could not be fetched from {access.endpoint}: {reason}", found=found, next_step=next_step
    )


def _explain(error: BaseException, commit: HubCommit, file: str | None) -> tuple[str, str]:
    """Return the reason why the hub refused, and the user's next step."""
    kind, status = type(error).__name__, _status(error)
    model, endpoint = commit.model, commit.access.endpoint
    # An address of a dataset is no folder's path; the id of a model may be one.
    no_folder = " (no folder of that name is here either)" if commit.kind is RepositoryKind.MODEL else ""
    check_id = (
        f"Check the id{no_folder}; for a private one log in with `hf auth login` "
        "or set HF_TOKEN to a valid token."
    )
    check_endpoint = (
        "Check HF_ENDPOINT and the proxy, or fetch it with `hf download` and give "
        f"{commit.kind.option} the folder."
    )
    if kind == "GatedRepoError":
        return (
            f"{model} is gated, and its owner has not admitted this token (or there is no token)",
            f"Ask for access at {endpoint}/{model}, then log in with `hf auth login` or set HF_TOKEN.",
        )
    if kind == "RevisionNotFoundError":
        return (
            f"it has no revision {commit.revision!r}",
            f"Name a branch, a tag or a whole commit of it: {commit.kind.option} {commit.kind.pattern}.",
        )
    if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        reason = f"revision {commit.revision!r} has no file {file!r}"
        return reason, check_id if status in (401, 403, 404) else check_endpoint
    if kind == "RepositoryNotFoundError" or status == 404:
        return f"there is no {commit.kind} of that id, or it is private and hidden from this token", check_id
    if status == 401:
        return "the hub wants a valid token", check_id
    if status == 403:
        return "the hub forbids it", check_id
    return "the answer is not what a hub says", check_endpoint


def root_cause(error: BaseException) -> BaseException:
    """Return what failed: huggingface_hub reports it as "not in the cache", or wraps what made an upload fail."""
    while type(error).__name__ in ("LocalEntryNotFoundError", "RuntimeError") and error.__cause__ is not None:
        error = error.__cause__
    return error


def _asked_delay_s(error: BaseException) -> float:
    """Return the seconds that the server asks to wait before the next request, or 0."""
    headers = getattr(getattr(root_cause(error), "response", None), "headers", {})
    limited = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    retry_after = headers.get("retry-after", "").strip()
    return max(float(limited[1]) if limited else 0.0, float(retry_after) if retry_after.isdigit() else 0.0)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def _library(error: BaseException) -> str:
    """Return the package that defines the error's class; "builtins" for Python's own."""
    return type(error).__module__.partition(".")[0]
