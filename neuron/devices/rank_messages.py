"""Crew: how the ranks of a run talk on the host, and how each learns that another one failed.

The lead tells the others what to do and gathers what they have. Their talk goes through a group of its own, over
gloo: what a port sends while a layer runs cannot get between. A rank that fails leaves word in the store before it
ends. The others, who then find their connections closed, look there for the cause.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.rendezvous import rendezvous

from minimax_tools.errors import BackendError, CannotRunError, Mm2Error, UsageError
from minimax_tools.machine.native_output import native_output_dropped
from neuron.devices.distributed import probe_group
from neuron.devices.ranks import Ranks

# The lead may read, write and judge for long while the others wait; one that dies is noticed at once.
_TALK_TIMEOUT = timedelta(hours=2)
# Before it meets the others the lead may have a model to fetch.
_ARRIVAL_TIMEOUT = timedelta(hours=24)
# How long to look for the cause of a closed connection: whoever launched the ranks tells of one that was killed.
_CAUSE_S = 3.0
_POLL_S = 0.05
_LEAD_KEY, _FAILURE_KEY, _END_KEY = "lead", "failure", "end"
_FIRST_ATTEMPT = "0"
_TIMED_OUT = re.compile(r"timed out", re.IGNORECASE)
_CONNECTION = re.compile(r"gloo|connection|socket|recv|timed out|broken pipe|NCCL", re.IGNORECASE)


class RankFailedError(CannotRunError):
    """Another rank failed, and that ended the run.

    Args:
        rank: Which.
        text: Why, in its own words.
    """

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} failed: {text}")


class RankUnheardError(CannotRunError):
    """A rank waited for the others for longer than anything takes.

    Args:
        rank: Which.
        error: What it got at last.
    """

    def __init__(self, rank: int, error: Exception) -> None:
        self.rank = rank
        where = error.what if isinstance(error, Mm2Error) else str(error)
        super().__init__(
            f"{where}: rank {rank} waited in vain for the other ranks",
            next_step="All must make the same collective calls, in the same order; see --debug for the traceback.",
        )


class Crew:
    """The ranks of a run, as one of them talks to the others; alone there is nobody to talk to.

    Args:
        ranks: Which one this is.
        store: torch.distributed's, which all of them reach; None where there is one rank.
    """

    def __init__(self, ranks: Ranks, store: Any = None) -> None:
        self.ranks = ranks
        self._store = store
        self._group: Any = None

    def meet(self) -> None:
        """Open the group to talk through; the process group is up.

        Raises:
            BackendError: It cannot be trusted.
        """
        if self.ranks.are_several:
            with native_output_dropped():
                self._group = torch.distributed.new_group(backend="gloo", timeout=_TALK_TIMEOUT)
            probe_group(torch.device("cpu"), group=self._group)

    def tell(self, message: Any) -> None:
        """Give all others a value, as the lead."""
        if self.ranks.are_several:
            torch.distributed.broadcast_object_list([message], src=0, group=self._group)

    def hear(self) -> Any:
        """Take the value that the lead gives."""
        messages = [None]
        torch.distributed.broadcast_object_list(messages, src=0, group=self._group)
        return messages[0]

    def gather(self, piece: Any) -> list[Any]:
        """Of all ranks the piece, in their order; on others than the lead nothing."""
        if not self.ranks.are_several:
            return [piece]
        pieces = [None] * self.ranks.degree if self.ranks.is_lead else None
        torch.distributed.gather_object(piece, pieces, dst=0, group=self._group)
        return pieces or []

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the others of an error in the block; raise theirs where it is the cause of this rank's.

        Raises:
            RankFailedError: Another rank failed first.
        """
        try:
            yield
        except KeyboardInterrupt:
            if self._store is not None:
                leave_word(self._store, {"rank": self.ranks.rank, "text": "interrupted"})
            raise
        except Exception as error:
            if self._store is None:
                raise
            told = error
            if _matches(error, _TIMED_OUT) and not isinstance(error, RankUnheardError):
                told = RankUnheardError(self.ranks.rank, error)
            cause = self._find_cause(error, str(told) or type(told).__name__)
            if cause["rank"] != self.ranks.rank:
                raise RankFailedError(cause["rank"], cause["text"]) from error
            if told is not error:
                raise told from error
            raise

    def _find_cause(self, error: Exception, text: str) -> dict[str, Any]:
        """Whoever failed first: this rank with its text, unless another one left word, or is about to."""
        own = {"rank": self.ranks.rank, "text": text}
        deadline = time.monotonic() + (_CAUSE_S if _matches(error, _CONNECTION) else 0.0)
        try:
            while time.monotonic() < deadline and not self._store.check([_FAILURE_KEY]):
                if self._store.check([_END_KEY]):
                    # Not a failure by itself: in a run that ends well the others end first.
                    own = json.loads(self._store.get(_END_KEY))
                    break
                time.sleep(_POLL_S)
            return leave_word(self._store, own)
        except RuntimeError:
            # The store went with whoever launched the ranks.
            return own


def open_store(ranks: Ranks) -> Any:
    """torch.distributed's store, of the ranks that torchrun or mm2 launched; the others wait there for the lead.

    Raises:
        BackendError: It cannot be reached.
        UsageError: The variables that tell of it are missing.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"WORLD_SIZE tells of {ranks.degree} ranks, but not how they find each other",
            expected="the variables that torchrun sets",
            found=f"no {', '.join(missing)}",
            next_step=f"Start torchrun --nproc-per-node {ranks.degree} -m neuron …, or unset WORLD_SIZE.",
        )
    try:
        store, _, _ = next(rendezvous("env://", timeout=_ARRIVAL_TIMEOUT))
        # torchrun keeps its store when it starts the ranks anew: what an attempt before left there is not read.
        store = attempt_store(store, attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", _FIRST_ATTEMPT))
        if ranks.is_lead:
            store.set(_LEAD_KEY, "here")
        else:
            store.wait([_LEAD_KEY], _ARRIVAL_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise BackendError(
            "the ranks' store cannot be reached",
            expected=f"one at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            found=str(error).splitlines()[0],
            next_step="Look for the error of rank 0, which comes first.",
        ) from error
    return store


def leave_word(store: Any, failure: dict[str, Any]) -> dict[str, Any]:
    """Say in a store that a rank failed, unless another one was first: whoever that was, and its text."""
    first: dict[str, Any] = json.loads(store.compare_set(_FAILURE_KEY, "", json.dumps(failure)))
    return first


def tell_end(store: Any, rank: int) -> None:
    """Say in a store that a rank ended, with no error: whoever loses the connection to it knows whose it was."""
    store.set(_END_KEY, json.dumps({"rank": rank, "text": "it ended before the run did"}))


def attempt_store(store: Any, *, attempt: str = _FIRST_ATTEMPT) -> Any:
    """The part of a store that the ranks of one attempt use."""
    return torch.distributed.PrefixStore(f"mm2/{attempt}", store)  # type: ignore[attr-defined]  # not in its __all__


def _matches(error: BaseException, pattern: re.Pattern[str]) -> bool:
    """Whether an error that is not mm2's own, or one that it came from, is of such a text."""
    cause: BaseException | None = error
    while cause is not None:
        if not isinstance(cause, Mm2Error) and pattern.search(str(cause)):
            return True
        cause = cause.__cause__
    return False
