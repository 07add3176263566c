"""Watch: notices a dead rank while this one computes.

Every rank keeps its status in the store: a state, and the number of its last sign of life.

| event | evidence |
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

ALIVE = "alive"
FAILED = "failed"  # The rank reported why.
DONE = "done"  # No other rank needs it any more.

_INTERVAL_S = 0.5
# A rank that reads or computes still gives signs of life; only one that holds Python's lock for so long would be taken
# for dead. Counted in rounds of this rank: where a whole machine was suspended, no rank is late.
_SILENT_ROUNDS = 80
SILENT_S = _SILENT_ROUNDS * _INTERVAL_S


def status_key(rank: int) -> str:
    """Return the key of a rank's status in the store; it has a value before the rank's watch begins."""
    return f"status/{rank}"


class Watch:
    """A thread that gives signs of life for this rank and looks for those of the others.

    Args:
        store: A connection of its own to torch.distributed's store, with a status of every rank.
        rank: This one.
        processes: The ranks' processes, in rank order.
        on_loss: Called once, from the watch's thread, at the first loss.
    """

    def __init__(
        self, store: Any, rank: int, processes: Sequence[Process], *, on_loss: Callable[[], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._processes = tuple(processes)
        self._tell_loss = on_loss
        self._num_rounds = 0
        self._state = ALIVE
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
        """End the thread; nothing is called any more once this returns."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def lost(self) -> Mapping[int, str]:
        """The dead ranks, each with the reason; an empty reason for a rank that reported its own."""
        return dict(self._lost)

    @property
    def store_fault(self) -> str | None:
        """The store's fault in words; None while it answers."""
        return self._store_fault

    @property
    def has_loss(self) -> bool:
        """True if a rank died, or the store is out of reach."""
        return bool(self._lost) or self._store_fault is not None

    def tell(self, state: str) -> None:
        """Write this rank's state to the store, and wait for the store's answer."""
        self._state = state
        with self._lock:
            self._give_sign()

    def is_done(self, rank: int) -> bool:
        """Return True if a rank was done at the last look."""
        return self._statuses.get(rank, ("", 0))[0].startswith(DONE)

    def on_look(self, call: Callable[[], None] | None) -> None:
        """Call a function at every look. The function before it has ended then, unless the store hangs."""
        self._on_look = call
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
            self._store_fault = f"it did not answer for {SILENT_S:.0f} s"
        if call.error is not None:
            # torch's DistError: the process that serves the store has ended.
            text = str(call.error) or type(call.error).__name__
            self._store_fault = text.splitlines()[0]

    def _run(self) -> None:
        has_told = False
        while not self._ended.wait(_INTERVAL_S):
            self._num_rounds += 1
            if self._store_fault is None:
                self.look()
            if self.has_loss and not has_told:
                has_told = True
                self._tell_loss()

    def _look(self) -> None:
        with self._lock:
            self._give_sign()
            others = [rank for rank in range(len(self._processes)) if rank != self._rank]
            statuses = self._store.multi_get([status_key(rank) for rank in others])
            for rank, status in zip(others, statuses, strict=True):
                reason = self._judge(rank, status.decode())
                if reason is not None:
                    self._lost.setdefault(rank, reason)
            if self._on_look is not None:
                self._call_on_look(self._on_look)

    def _give_sign(self) -> None:
        self._store.set(status_key(self._rank), f"{self._state} {self._num_rounds}")

    def _judge(self, rank: int, status: str) -> str | None:
        """Return the reason of a rank's death; None where it lives or is done."""
        last, since = self._statuses.setdefault(rank, (status, self._num_rounds))
        if status != last:
            since = self._num_rounds
            self._statuses[rank] = (status, since)
        if status.startswith(DONE):
            return None
        if status.startswith(FAILED):
            return ""
        if self._processes[rank].is_gone:
            return "its process is gone: killed, or out of memory"
        if self._num_rounds - since > _SILENT_ROUNDS:
            return f"it gave no sign of life for {SILENT_S:.0f} s"
        return None

    def _call_on_look(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            # Only a display ends; the signs of life go on.
            logger.warning("Progress is not shown any more: %s.", error)
            self._on_look = None
