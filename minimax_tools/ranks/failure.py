"""Failure of a rank: the errors that name it, and its record in the store, where other ranks find the cause.

When a rank ends, the others lose their connections to it. Their own errors then only say so, while the record in the
store says which rank failed first and why.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from minimax_tools.errors import CannotRunError, Mm2Error

RESUME = "Run the same command again: it resumes after the layers that are stored."
# Wait for the record of another rank's failure, in seconds: the launcher records a killed rank a moment after the
# rank's connections close.
_CAUSE_S = 3.0
# Time between two looks into the store, in seconds.
_POLL_S = 0.05
_FAILURE_KEY, _END_KEY = "failure", "end"
# torch raises a plain RuntimeError both for a wait that timed out and for a lost connection. Only its text tells.
_TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
_CONNECTION = re.compile(r"gloo|connection|socket|recv|timed out|broken pipe|NCCL", re.IGNORECASE)


class RankLostError(CannotRunError):
    """A rank, or the store through which ranks talk, is lost."""


class RankFailedError(RankLostError):
    """A rank failed, and that ended the run; `name` is the rank in words, such as `rank 1`."""

    def __init__(self, name: str, reason: str, *, next_step: str | None = None) -> None:
        super().__init__(f"{name} failed: {reason}", next_step=next_step)


class RankTimeoutError(RankLostError):
    """A rank waited for the other ranks longer than anything takes; `error` ended the wait."""

    def __init__(self, rank: int, error: Exception) -> None:
        where = error.what if isinstance(error, Mm2Error) else str(error)
        super().__init__(
            f"{where}: rank {rank} waited in vain for the other ranks",
            next_step="All must make the same collective calls, in the same order; see --debug for the traceback.",
        )


class ReportedElsewhereError(Mm2Error):
    """The run ended, and another rank reported why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another rank reported why the run ended")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A rank's failure, as the store keeps it: the rank's number, and the reason in words."""

    rank: int
    text: str

    def record(self, store: Any) -> RankFailure:
        """Record this failure unless the store holds one already; return the one that it then holds."""
        # torch's `compare_set` writes if the key has no value (""), and returns the value that it then has.
        first = store.compare_set(_FAILURE_KEY, "", json.dumps(asdict(self)))
        return RankFailure(**json.loads(first))

    @classmethod
    def read(cls, store: Any) -> RankFailure | None:
        """Return the failure that the store holds; None without one."""
        return cls(**json.loads(store.get(_FAILURE_KEY))) if store.check([_FAILURE_KEY]) else None


def record_end(store: Any, rank: int) -> None:
    """Record that a rank ended without an error, for another rank that then loses its connection to it."""
    end = RankFailure(rank=rank, text="it ended before the run did")
    store.set(_END_KEY, json.dumps(asdict(end)))


@contextmanager
def failing_together(store: Any, rank: int) -> Iterator[None]:
    """Record an error of the block for the other ranks. If another rank failed first, raise that failure instead.

    Args:
        store: Store that all ranks reach; None for a single rank, whose errors pass unchanged.
        rank: Number of this rank.

    Raises:
        RankFailedError: Another rank failed first.
        RankTimeoutError: The other ranks did not answer in time.
    """
    try:
        yield
    except KeyboardInterrupt:
        if store is not None:
            RankFailure(rank=rank, text="interrupted").record(store)
        raise
    except Exception as error:
        if store is None:
            raise
        # A RankTimeoutError comes from an inner block, and is named already.
        has_timed_out = _matches(error, _TIMED_OUT) and not isinstance(error, RankTimeoutError)
        own_error = RankTimeoutError(rank, error) if has_timed_out else error
        own_failure = RankFailure(rank=rank, text=str(own_error) or type(own_error).__name__)
        first_failure = find_first_failure(store, own_failure, cause=error)
        if first_failure.rank != rank:
            raise RankFailedError(f"rank {first_failure.rank}", first_failure.text) from error
        if own_error is not error:
            raise own_error from error
        raise


def find_first_failure(store: Any, own_failure: RankFailure, *, cause: BaseException) -> RankFailure:
    """Return the first recorded failure; record this rank's own, which `cause` caused, if there is none."""
    # A lost connection has its cause in another rank, so that rank's record is waited for.
    deadline = time.monotonic() + (_CAUSE_S if _matches(cause, _CONNECTION) else 0.0)
    try:
        while time.monotonic() < deadline and not store.check([_FAILURE_KEY]):
            if store.check([_END_KEY]):
                # A rank that ended early explains this rank's error. It is no failure otherwise: in a run that ends
                # well, some rank always ends first.
                own_failure = RankFailure(**json.loads(store.get(_END_KEY)))
                break
            time.sleep(_POLL_S)
        return own_failure.record(store)
    except RuntimeError:
        # The store ended with the launcher.
        return own_failure


def _matches(error: BaseException, pattern: re.Pattern[str]) -> bool:
    """Decide whether the error, or one of its causes, is not mm2's own and has a text that matches."""
    cause: BaseException | None = error
    while cause is not None:
        if not isinstance(cause, Mm2Error) and pattern.search(str(cause)):
            return True
        cause = cause.__cause__
    return False


# torchrun's number of the first attempt. After a failure it may start all ranks anew, as the next attempt.
_FIRST_ATTEMPT = "0"


def connect_store(timeout: timedelta) -> Any:
    """Connect to the store that MASTER_ADDR and MASTER_PORT name; wait for it, and for a key, at most `timeout`.

    Raises:
        RankLostError: The store cannot be reached.
    """
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise store_lost_error(error) from error
    return store


@contextmanager
def store_errors() -> Iterator[None]:
    """Translate torch's error for a store that is out of reach.

    Raises:
        RankLostError: The store cannot be reached.
    """
    try:
        yield
    except RuntimeError as error:
        raise store_lost_error(error) from error


def store_lost_error(error: Exception) -> RankLostError:
    """Return mm2's error for an error of torch that says that the store is out of reach."""
    return RankLostError(
        "the store through which the ranks talk cannot be reached",
        expected=f"a store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
        found=(str(error) or type(error).__name__).splitlines()[0],
        next_step="Look for the error of rank 0, which comes first.",
    )


def attempt_store(store: Any, *, attempt: str = _FIRST_ATTEMPT) -> Any:
    """Return a view of a store for one attempt of `mm2-test`: its keys begin with `mm2/{attempt}`.

    torchrun keeps its store from one attempt to the next; mm2's own launcher makes one attempt only.
    """
    return torch.distributed.PrefixStore(f"mm2/{attempt}", store)  # type: ignore[attr-defined]  # not in its __all__


def current_attempt() -> str:
    """Return the number of torchrun's attempt, from 0."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", _FIRST_ATTEMPT)
