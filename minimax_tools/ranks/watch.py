"""Watch: a thread that notices a dead rank while this rank computes.

Every rank keeps its status in the store: its state, and a number that grows with every sign of life.

| event | how the other ranks notice |
|---|---|
| a rank fails | it sets its state to FAILED before it ends |
| a rank of this machine is killed | its process is gone |
| a rank of another machine is killed | no sign of life for 40 s |
| the machine of the store dies, or is cut off | the store does not answer |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minimax_tools.ranks.background_call import BackgroundCall
from minimax_tools.ranks.process import Process

logger = logging.getLogger(__name__)

# States of a rank. One that FAILED reported why; one that is DONE is not needed by the others any more.
ALIVE, FAILED, DONE = "alive", "failed", "done"

# Seconds between two rounds of the watch.
_INTERVAL_S = 0.5
# Rounds without a sign of life after which a rank counts as dead. The thread gives signs of life while its rank reads
# or computes, unless other code holds Python's lock for so long. Rounds, not seconds, so that no rank is late after a
# suspended machine wakes.
_SILENT_ROUNDS = 80
SILENT_S = _SILENT_ROUNDS * _INTERVAL_S


def status_key(rank: int) -> str:
    """Return the key of a rank's status in the store; the handshake of the ranks gives it its first value."""
    return f"status/{rank}"


class Watch:
    """A thread that gives signs of life for this rank and looks for those of the others.

    Args:
        store: Connection to the run's store for the watch alone; it holds a status of every rank.
        rank: Number of this rank.
        processes: Processes of the ranks, in rank order.
        on_loss: Function to call once, from the watch's thread, when the first rank or the store is lost.
    """

    def __init__(
        self, store: Any, rank: int, processes: Sequence[Process], *, on_loss: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._processes = tuple(processes)
        self._on_loss = on_loss
        self._num_rounds = 0
        self._state = ALIVE
        # The last status of every other rank, and the round in which it was first seen.
        self._statuses: dict[int, tuple[str, int]] = {}
        self._lost: dict[int, str] = {}
        self._store_fault: str | None = None
        self._on_look: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Once this returns, the watch calls no function any more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def lost(self) -> Mapping[int, str]:
        """The dead ranks, each with the reason; the reason is empty if the rank itself reported it."""
        return dict(self._lost)

    @property
    def store_fault(self) -> str | None:
        """The store's fault in words; None while it answers."""
        return self._store_fault

    @property
    def has_loss(self) -> bool:
        """True if a rank died, or the store is out of reach."""
        return bool(self._lost) or self._store_fault is not None

    def set_state(self, state: str) -> None:
        """Write this rank's state to the store, and wait for the store's answer."""
        self._state = state
        with self._lock:
            self._give_sign()

    def is_done(self, rank: int) -> bool:
        """Return True if a rank was done at the last look."""
        return self._statuses.get(rank, ("", 0))[0].startswith(DONE)

    def on_look(self, call: Callable[[], None] | None) -> None:
        """Call a function at every look from now on, instead of the one given before.

        When this returns, the function given before is not running any more, unless the store hangs.
        """
        self._on_look = call
        # A look holds the lock, so taking it waits for the look in progress.
        if self._lock.acquire(timeout=4 * _INTERVAL_S):
            self._lock.release()

    def look(self) -> None:
        """Look once; wait for the store at most as long as a rank may be silent."""
        call = BackgroundCall(self._look)
        for _ in range(_SILENT_ROUNDS):
            if call.is_over(_INTERVAL_S):
                break
            if self._ended.is_set():
                return
        else:
            # No `break`: the call is not over.
            self._store_fault = f"it did not answer for {SILENT_S:.0f} s"
        if call.error is not None:
            # An error of torch: the process that serves the store has ended.
            text = str(call.error) or type(call.error).__name__
            self._store_fault = text.splitlines()[0]

    def _run(self) -> None:
        has_called = False
        while not self._ended.wait(_INTERVAL_S):
            self._num_rounds += 1
            if self._store_fault is None:
                self.look()
            if self.has_loss and not has_called:
                has_called = True
                self._on_loss()

    def _look(self) -> None:
        with self._lock:
            self._give_sign()
            others = [rank for rank in range(len(self._processes)) if rank != self._rank]
            statuses = self._store.multi_get([status_key(rank) for rank in others])
            for rank, status in zip(others, statuses, strict=True):
                reason = self._find_death(rank, status.decode())
                if reason is not None:
                    # The first reason stays.
                    self._lost.setdefault(rank, reason)
            if self._on_look is not None:
                self._call_on_look(self._on_look)

    def _give_sign(self) -> None:
        self._store.set(status_key(self._rank), f"{self._state} {self._num_rounds}")

    def _find_death(self, rank: int, status: str) -> str | None:
        """Return the reason of a rank's death, empty if the rank reported it; None if it lives or is done."""
        last_status, round_seen = self._statuses.get(rank, ("", 0))
        if status != last_status:
            round_seen = self._num_rounds
            self._statuses[rank] = (status, round_seen)
        if status.startswith(DONE):
            return None
        if status.startswith(FAILED):
            return ""
        if self._processes[rank].is_gone:
            return "its process is gone: killed, or out of memory"
        if self._num_rounds - round_seen > _SILENT_ROUNDS:
            return f"it gave no sign of life for {SILENT_S:.0f} s"
        return None

    def _call_on_look(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            # Only the display ends. The watch must go on.
            logger.warning("Progress is not shown any more: %s.", error)
            self._on_look = None
