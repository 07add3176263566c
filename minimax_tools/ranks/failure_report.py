"""FailureReport: which rank reports a failure, and with which error each rank ends.

Of the ranks that fail with the same text, one reports it. The others end with ReportedElsewhereError, which prints
nothing new; so do the ranks that only lost another one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

from minimax_tools.errors import CannotRunError, Mm2Error, UsageError
from minimax_tools.ranks.background_call import BackgroundCall
from minimax_tools.ranks.failure import (
    RESUME,
    STORE_LOST,
    RankFailedError,
    RankLostError,
    ReportedElsewhereError,
)
from minimax_tools.ranks.interrupt import InterruptedRunError
from minimax_tools.ranks.watch import SILENT_S, Watch

# Time between two looks at the watch, in seconds.
_POLL_S = 0.02
# Longest search for the dead rank in seconds: after a lost connection (the watch takes a rank for dead that is silent
# for SILENT_S), and after an order to stop.
_CONNECTION_PATIENCE_S = SILENT_S + 5.0
_STOP_PATIENCE_S = 5.0
# Longest wait for the store in seconds: the rank that holds it may have gone already.
_STORE_PATIENCE_S = 5.0


class FailureReport:
    """A choice of the error with which this rank ends, whatever ended its work.

    `name` is the function that names a rank in words, `store` torch.distributed's store. `watch` is None if nothing
    watches the other ranks.
    """

    def __init__(self, rank: int, *, name: Callable[[int], str], store: Any, watch: Watch | None) -> None:
        self._rank = rank
        self._name = name
        self._store = store
        self._watch = watch

    def of_error(self, error: BaseException) -> Mm2Error:
        """Return the error to end with after `error` ended this rank's work."""
        # Told to stop by a signal: usually the launcher stops the ranks because one died. That one is named.
        if isinstance(error, InterruptedRunError):
            return self._of_dead_rank(_STOP_PATIENCE_S, f"{self._name(self._rank)} was told to stop")
        if isinstance(error, (RankLostError, ReportedElsewhereError)):
            return error
        text = str(error)
        if isinstance(error, KeyboardInterrupt):
            text = "interrupted"
        elif not isinstance(error, Mm2Error):
            text = f"unexpected {type(error).__name__}: {text}" if text else type(error).__name__
        if not self._is_first_to_report(text):
            return ReportedElsewhereError(getattr(error, "exit_code", CannotRunError.exit_code))
        # Wrong usage keeps its own exit code.
        if isinstance(error, UsageError):
            return error
        return RankFailedError(self._name(self._rank), text)

    def of_broken_connection(self, failure: str, error: Exception) -> Mm2Error:
        """Return the error to end with after a connection broke. Which rank is to blame shows a moment later."""
        text = str(error) or type(error).__name__
        return self._of_dead_rank(_CONNECTION_PATIENCE_S, f"{failure}: {text.splitlines()[0]}")

    def of_loss(self, watch: Watch) -> Mm2Error:
        """Return the error to end with after the watch noticed a loss."""
        lost = watch.lost
        if not lost:
            # No rank is lost, so the watch noticed that the store is. Without it each rank reports.
            return RankLostError(f"{STORE_LOST}: {watch.store_fault}", next_step=RESUME)
        # `lost` maps a rank to how it died. An empty text means that the rank ended in order, after its own report.
        has_reported_itself = "" in lost.values()
        # One survivor is enough to report a dead rank: all claim the same text, "lost", whatever each of them saw.
        if has_reported_itself or not self._is_first_to_report("lost"):
            return ReportedElsewhereError(CannotRunError.exit_code)
        rank, reason = min(lost.items())
        return RankFailedError(self._name(rank), reason, next_step=RESUME)

    def _of_dead_rank(self, patience_s: float, otherwise: str) -> Mm2Error:
        """Name the dead rank as soon as it is known. If it stays unknown, return an error that says `otherwise`."""
        deadline = time.monotonic() + patience_s
        while self._watch is not None and time.monotonic() < deadline:
            if self._watch.has_loss:
                return self.of_loss(self._watch)
            time.sleep(_POLL_S)
        if self._is_first_to_report("lost"):
            return RankLostError(otherwise, next_step=RESUME)
        return ReportedElsewhereError(CannotRunError.exit_code)

    def _is_first_to_report(self, text: str) -> bool:
        """Claim the report `text` for this rank, and return True if no other rank claimed the same text before.

        The claim holds the rank's number, so a rank that asks again gets True again: an interrupt may have cut it
        short, or its thread that shows progress asked first.
        """
        key = f"told/{hashlib.sha256(text.encode()).hexdigest()}"  # a digest: the text may be long
        own_claim = str(self._rank)
        # Sets the key if it is absent, and returns what it then holds.
        call = BackgroundCall(lambda: self._store.compare_set(key, "", own_claim).decode())
        has_answer = call.is_over(_STORE_PATIENCE_S) and call.error is None
        # Without an answer of the store each rank reports.
        return not has_answer or call.result == own_claim
