"""Failures of requests to a hub: new attempts after those that may pass, and errors for the user.

huggingface_hub uses requests before 1.0, httpx before 2.0 and httpx2 since. Their errors have no common class, so the
library that an error comes from decides.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TypeVar

from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess, HubCommit

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_LONGEST_DELAY_S = 30.0
# The hub counts requests in windows of five minutes. A longer wait is not worth it.
_LONGEST_ASKED_DELAY_S = 330.0
_HTTP_LIBRARIES = frozenset({"requests", "urllib3", "httpx", "httpx2", "httpcore"})
_PASSING_STATUSES = frozenset({408, 425, 429})
_RATE_LIMIT = re.compile(r"r=0\b.*?\bt=(\d+)")
_MAX_FOUND_LENGTH = 300


class BrokenTransferError(ConnectionError):
    """A body that is shorter or longer than announced."""


class FetchStoppedError(Exception):
    """A transfer that was ended by another file's failure, or by the user."""


class Attempts:
    """Repeated attempts at one piece of work, which count its failures in a row.

    Args:
        access: Number of attempts, and the wait between them.
        what: Name of the work, for the log.
        stop: Event that ends the attempts.
    """

    def __init__(self, access: HubAccess, *, what: str, stop: threading.Event) -> None:
        self._access = access
        self._what = what
        self._stop = stop
        self._num_failed = 0

    def run(self, work: Callable[[], Result]) -> Result:
        """Call `work` until it succeeds, and return its result.

        Raises:
            FetchStoppedError: `stop` was set.
            Exception: The last failure of `work`.
        """
        while True:
            try:
                return work()
            except Exception as error:
                self.fail(error)

    def progress(self) -> None:
        """Forget earlier failures: data has arrived."""
        self._num_failed = 0

    def fail(self, error: Exception) -> None:
        """Wait after a failure, or raise it if it was the last attempt or cannot pass.

        Raises:
            FetchStoppedError: `stop` was set.
            Exception: `error`.
        """
        self._num_failed += 1
        asked_s = asked_delay_s(error)
        if (
            not is_transient(error)
            or self._num_failed >= self._access.num_attempts
            or asked_s > _LONGEST_ASKED_DELAY_S
        ):
            raise error
        delay_s = max(
            asked_s, min(_LONGEST_DELAY_S, self._access.first_delay_s * 2 ** (self._num_failed - 1))
        )
        logger.warning(
            "%s: %s: %s. Attempt %d of %d in %.3g s.",
            self._what,
            type(error).__name__,
            " ".join(str(error).split())[:200].rstrip("."),
            self._num_failed + 1,
            self._access.num_attempts,
            delay_s,
        )
        if self._stop.wait(delay_s):
            raise FetchStoppedError


def is_transient(error: BaseException) -> bool:
    """Decide whether a request may succeed later: no connection, a timeout, a busy or failing server."""
    error = _root(error)
    status = _status(error)
    if status is not None:
        return status in _PASSING_STATUSES or status >= 500
    if isinstance(error, (ConnectionError, TimeoutError)):
        return type(error).__name__ != "OfflineModeIsEnabled"
    return _library(error) in _HTTP_LIBRARIES


def asked_delay_s(error: BaseException) -> float:
    """Return the seconds that the server asks to wait before the next request, or 0."""
    response = getattr(_root(error), "response", None)
    headers: Mapping[str, str] = {} if response is None else response.headers
    limited = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return max(_seconds(headers.get("retry-after", "")), float(limited[1]) if limited else 0.0)


def translate(error: BaseException, commit: HubCommit, *, file: str | None = None) -> CheckpointError:
    """Build the error for a request about a model (or one `file` of it) that failed for good."""
    error = _root(error)
    if isinstance(error, CheckpointError):
        return error
    model, access = commit.model, commit.access
    what = f"{file} of {model}" if file else f"the hub's model {model}"
    if is_transient(error):
        return CheckpointError(
            f"{what} could not be fetched: {access.endpoint} does not answer, or breaks off",
            found=_found(error),
            next_step="Check the network and HF_ENDPOINT and run again: received data is kept, and fetching "
            "goes on from there. Or fetch it with `hf download` elsewhere and give --model the folder.",
        )
    if _library(error) == "builtins" and isinstance(error, OSError):
        return CheckpointError(
            f"{what} cannot be stored in {access.cache_dir}",
            found=str(error),
            next_step="Make room there or mend its permissions, or set HF_HOME to another disk.",
        )
    return CheckpointError(
        f"{what} could not be fetched from {access.endpoint}: {_reason(error, commit, file)}",
        found=_found(error),
        next_step=_next_step(error, model, access),
    )


def _reason(error: BaseException, commit: HubCommit, file: str | None) -> str:
    kind, status = type(error).__name__, _status(error)
    model, revision = commit.model, commit.revision
    if kind == "GatedRepoError":
        return f"{model} is gated, and its owner has not let this token, or no token, in"
    if kind == "RevisionNotFoundError":
        return f"it has no revision {revision!r}"
    if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        return f"revision {revision!r} has no file {file!r}"
    if kind == "RepositoryNotFoundError" or status == 404:
        return "there is no model of that id, or it is private and hidden from this token"
    if status == 401:
        return "the hub wants a valid token"
    if status == 403:
        return "the hub forbids it"
    return "the answer is not what a hub says"


def _next_step(error: BaseException, model: str, access: HubAccess) -> str:
    kind, status = type(error).__name__, _status(error)
    if kind == "GatedRepoError":
        return (
            f"Ask for access at {access.endpoint}/{model}, then log in with `hf auth login` or set HF_TOKEN."
        )
    if kind == "RevisionNotFoundError":
        return "Name a branch, a tag or a whole commit of it: --model owner/name@revision."
    if kind == "RepositoryNotFoundError" or status in (401, 403, 404):
        return (
            "Check the id (no folder of that name is here either); for a private model log in with "
            "`hf auth login` or set HF_TOKEN to a valid token."
        )
    return "Check HF_ENDPOINT and the proxy, or fetch it with `hf download` and give --model the folder."


def _root(error: BaseException) -> BaseException:
    # huggingface_hub reports a failed request as "not in the cache", with the failure as its cause.
    while type(error).__name__ == "LocalEntryNotFoundError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def _library(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _found(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_MAX_FOUND_LENGTH].rstrip(" .")


def _seconds(retry_after: str) -> float:
    """Read the header Retry-After, which holds seconds or a date."""
    if retry_after.strip().isdigit():
        return float(retry_after)
    try:
        until = parsedate_to_datetime(retry_after)
    except (TypeError, ValueError):
        return 0.0
    now = datetime.now(timezone.utc)
    return max(0.0, (until.replace(tzinfo=until.tzinfo or timezone.utc) - now).total_seconds())
