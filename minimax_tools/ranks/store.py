"""The store of a run: texts by key, which the launcher serves to all ranks (torch.distributed's store)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from minimax_tools.ranks.failure import STORE_LOST, RankLostError

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


def store_lost_error(error: Exception) -> RankLostError:
    """Return mm2's error for an error of torch that says that the store is out of reach."""
    return RankLostError(
        STORE_LOST,
        expected=f"a store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
        found=(str(error) or type(error).__name__).splitlines()[0],
        next_step="Look for the error of rank 0, which comes first.",
    )


def attempt_store(store: Any, *, attempt: str = _FIRST_ATTEMPT) -> Any:
    """Return a view of a store for one attempt of `mm2-test`: its keys begin with `mm2/{attempt}`.

    torchrun keeps its store from one attempt to the next; mm2's own launcher makes one attempt only. Golden ranks do
    not use this: their handshake names their attempts.
    """
    return torch.distributed.PrefixStore(f"mm2/{attempt}", store)  # type: ignore[attr-defined]  # not in its __all__


def current_attempt() -> str:
    """Return the number of torchrun's attempt, from 0."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", _FIRST_ATTEMPT)


class LocalStore:
    """The store of a single rank, with those calls of torch's stores that it needs, without torch.distributed."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        """Keep a value."""
        self._values[key] = value

    def get(self, key: str) -> str:
        """Return a value that was kept, as text. torch's stores return bytes; callers read either as JSON."""
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if every key has a value."""
        return all(key in self._values for key in keys)
