"""Failures of requests to a hub: which may pass by themselves, and what to tell the user.

huggingface_hub speaks through requests before 1.0, through httpx before 2.0 and through httpx2 since: their
errors have no common class, so they are told by the library they come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess

_HTTP_LIBRARIES = frozenset({"requests", "urllib3", "httpx", "httpx2", "httpcore"})
_PASSING_STATUSES = frozenset({408, 425, 429})
_RATE_LIMIT = re.compile(r"r=0\b.*?\bt=(\d+)")
_MAX_FOUND_LENGTH = 300


class BrokenTransferError(ConnectionError):
    """A body that ended early, or was longer than it was said to be."""


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
    """Seconds that the server asks to wait before the next request; 0 where it does not say."""
    response = getattr(_root(error), "response", None)
    headers: Mapping[str, str] = {} if response is None else response.headers
    limited = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return max(_seconds(headers.get("retry-after", "")), float(limited[1]) if limited else 0.0)


def translate(
    error: BaseException, *, model: str, revision: str, access: HubAccess, file: str | None = None
) -> CheckpointError:
    """Build the error for a request about `model` (or one `file` of it) that failed for good."""
    error = _root(error)
    if isinstance(error, CheckpointError):
        return error
    what = f"{file} of {model}" if file else f"the hub's model {model}"
    if is_transient(error):
        return CheckpointError(
            f"{what} could not be fetched: {access.endpoint} does not answer, or breaks off",
            found=_found(error),
            next_step="Check the network and HF_ENDPOINT and run again: what has come is kept, and fetching "
            "goes on from there. Or fetch it with `hf download` elsewhere and give --model the folder.",
        )
    if _library(error) == "builtins" and isinstance(error, OSError):
        return CheckpointError(
            f"{what} cannot be stored in {access.cache_dir}",
            found=str(error),
            next_step="Make room there or mend its permissions, or set HF_HOME to another disk.",
        )
    return CheckpointError(
        f"{what} could not be fetched from {access.endpoint}: {_reason(error, model, revision, file)}",
        found=_found(error),
        next_step=_next_step(error, model, access),
    )


def _reason(error: BaseException, model: str, revision: str, file: str | None) -> str:
    kind, status = type(error).__name__, _status(error)
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
    # huggingface_hub reports a failed look-up as "not in the cache", with what happened as its cause.
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
